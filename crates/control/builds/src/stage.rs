//! Carries out the instructions of stages.
//!
//! [`Builder::stage`] carries one stage out and remembers its result. Stages that it begins with, copies from or mounts are
//! carried out first, on demand: a stage that the target does not need never runs. [`State`] is the stage under way:
//!
//! ```text
//!   key, tag ── the state after the last step, as a snapshot
//!   machine  ── a sandbox with that state; there is none while steps come from the cache
//!   folders  ── of WORKDIR, made by the next step
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;

use forkd_api::{BuildEvent, ErrorCode};
use forkd_dockerfile::{
    Command, Copy, CopySource, Dockerfile, Instruction, Kind, MountKind, RunNetwork, RunStep,
    expand, parse,
};
use forkd_guest_proto::{ExecRequest, WriteRequest};
use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;
use forkd_types::Policy;
use serde_json::{Value, json};

use crate::base::{Base, Bases};
use crate::cache;
use crate::config::Config;
use crate::context::Context;
use crate::copy::{self, Destination};
use crate::error::BuildError;
use crate::events::Events;
use crate::key::Key;
use crate::machine::Machine;
use crate::mounts::{self, Mounted, Prepared};
use crate::wish::BuildWish;

/// Steps that change files, from the base to the result: a chain of snapshots has a limit.
const MAX_STEPS: usize = 56;
const SCRIPT: &str = "/.forkd-build/script";
/// Variables that every Dockerfile may use.
const PLATFORM: [(&str, &str); 6] = [
    ("TARGETPLATFORM", "linux/amd64"),
    ("TARGETOS", "linux"),
    ("TARGETARCH", "amd64"),
    ("BUILDPLATFORM", "linux/amd64"),
    ("BUILDOS", "linux"),
    ("BUILDARCH", "amd64"),
];

/// A build under way.
pub struct Builder<'a> {
    app: &'a Arc<App>,
    wish: &'a BuildWish,
    context: &'a Context,
    events: &'a Events,
    file: Dockerfile,
    /// `ARG` above the first `FROM`.
    globals: BTreeMap<String, String>,
    /// Results of stages, with the number of steps that led to each.
    results: Vec<Option<(Base, usize)>>,
    ran: u32,
    cached: u32,
}

/// A stage under way.
struct State {
    stage: usize,
    config: Config,
    args: BTreeMap<String, String>,
    base: (Key, forkd_types::Tag),
    machine: Option<Machine>,
    folders: Vec<String>,
    steps: usize,
}

impl State {
    fn variable(&self, name: &str) -> Option<String> {
        // A variable of the environment hides an argument.
        self.config
            .env(name)
            .or_else(|| self.args.get(name).cloned())
    }
}

/// A step that changes files.
enum Step {
    Run(RunStep),
    Files {
        copy: Copy,
        sources: Vec<copy::Source>,
    },
    Stage {
        copy: Copy,
        from: Base,
    },
    /// Only folders of `WORKDIR`.
    Folders,
}

impl<'a> Builder<'a> {
    pub fn new(
        app: &'a Arc<App>,
        wish: &'a BuildWish,
        context: &'a Context,
        events: &'a Events,
    ) -> Result<Self, BuildError> {
        let file = parse(&wish.dockerfile)?;
        let mut globals: BTreeMap<String, String> = PLATFORM
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        for (line, name, default) in &file.arguments {
            let given = wish.args.get(name).cloned();
            let value = match (given, default) {
                (Some(value), _) => Some(value),
                (None, Some(text)) => {
                    let value = expand(text, file.escape, &|name| globals.get(name).cloned());
                    Some(value.map_err(|error| {
                        BuildError::at(*line, ErrorCode::DockerfileInvalid, error)
                    })?)
                }
                (None, None) => None,
            };
            if let Some(value) = value {
                globals.insert(name.clone(), value);
            }
        }
        let results = vec![None; file.stages.len()];
        Ok(Self {
            app,
            wish,
            context,
            events,
            file,
            globals,
            results,
            ran: 0,
            cached: 0,
        })
    }

    /// Steps that ran, and steps whose result was in the cache.
    pub fn counts(&self) -> (u32, u32) {
        (self.ran, self.cached)
    }

    /// Carries out what the target needs. Returns its last state.
    pub async fn run(&mut self) -> Result<Base, BuildError> {
        let count = self.file.stages.len();
        let target = match &self.wish.target {
            None => count - 1,
            Some(name) => self.file.stage(name, count).ok_or_else(|| {
                let message = format!("the Dockerfile has no stage {name:.80}");
                Error::refused(ErrorCode::InvalidRequest, message)
            })?,
        };
        let unused = self.wish.args.keys().filter(|name| !self.declares(name));
        for name in unused {
            let text = format!("argument {name:.80} is not used: the Dockerfile has no ARG for it");
            self.events.note(text).await?;
        }
        Ok(self.stage(target).await?.0)
    }

    fn declares(&self, name: &str) -> bool {
        let mut kinds = self
            .file
            .stages
            .iter()
            .flat_map(|stage| stage.instructions.iter().map(|one| &one.kind));
        self.file.arguments.iter().any(|(_, found, _)| found == name)
            || kinds.any(|kind| {
                matches!(kind, Kind::Arg(all) if all.iter().any(|(found, _)| found == name))
            })
    }

    fn bases(&self) -> Bases<'a> {
        Bases {
            app: self.app,
            owner: &self.wish.owner,
            owns: &self.wish.owns,
            memory_mib: self.wish.memory_mib,
            vcpus: self.wish.vcpus,
            disk_mib: self.wish.disk_mib,
        }
    }

    /// The result of a stage, and the number of steps that led to it.
    fn stage(
        &mut self,
        index: usize,
    ) -> std::pin::Pin<Box<dyn Future<Output = Result<(Base, usize), BuildError>> + Send + '_>> {
        // Boxed: a stage may need another one.
        Box::pin(async move {
            if let Some(Some(done)) = self.results.get(index) {
                return Ok(done.clone());
            }
            let done = self.carry_out(index).await?;
            if let Some(place) = self.results.get_mut(index) {
                *place = Some(done.clone());
            }
            Ok(done)
        })
    }

    async fn carry_out(&mut self, index: usize) -> Result<(Base, usize), BuildError> {
        let Some(stage) = self.file.stages.get(index).cloned() else {
            return Err(Error::Task.into());
        };
        let (base, steps) = self.begin(index, &stage).await.map_err(|e| e.on(stage.line))?;
        let mut state = State {
            stage: index,
            config: base.config,
            args: BTreeMap::new(),
            base: (base.key, base.tag),
            machine: None,
            folders: Vec::new(),
            steps,
        };
        for instruction in &stage.instructions {
            let done = self.instruction(&mut state, instruction).await;
            done.map_err(|error| error.on(instruction.line))?;
        }
        if !state.folders.is_empty() {
            let last = Instruction {
                line: stage.line,
                text: format!("WORKDIR {}", state.config.folder()),
                kind: Kind::Workdir(String::new()),
            };
            self.step(&mut state, &last, json!("folders"), Step::Folders)
                .await?;
        }
        if let Some(machine) = state.machine.take() {
            machine.end().await;
        }
        let (key, tag) = state.base;
        let base = Base {
            key,
            tag,
            config: state.config,
        };
        Ok((base, state.steps))
    }

    async fn begin(
        &mut self,
        index: usize,
        stage: &forkd_dockerfile::Stage,
    ) -> Result<(Base, usize), BuildError> {
        let value = |text: &str| {
            let value = expand(text, self.file.escape, &|name| self.globals.get(name).cloned());
            value.map_err(|error| {
                BuildError::at(stage.line, ErrorCode::DockerfileInvalid, error)
            })
        };
        if let Some(platform) = &stage.platform {
            let platform = value(platform)?;
            if !["", "linux/amd64", "linux/x86_64"].contains(&platform.as_str()) {
                return Err(BuildError::at(
                    stage.line,
                    ErrorCode::UnsupportedInstruction,
                    format!("FROM --platform={platform:.40}: guests are linux/amd64"),
                ));
            }
        }
        let from = value(&stage.from)?;
        if from.is_empty() {
            let message = "FROM names no image: an argument is empty";
            return Err(BuildError::at(
                stage.line,
                ErrorCode::DockerfileInvalid,
                message,
            ));
        }
        if let Some(earlier) = self.file.stage(&from, index) {
            return self.stage(earlier).await;
        }
        let text = format!("FROM {from}");
        self.tell(stage.line, index, &text, false).await?;
        let base = match from.as_str() {
            "scratch" => self.bases().scratch(self.events).await?,
            _ => self.bases().image(&from, self.events).await?,
        };
        Ok((base, 0))
    }

    async fn tell(
        &self,
        line: u32,
        stage: usize,
        text: &str,
        cached: bool,
    ) -> Result<(), BuildError> {
        let event = BuildEvent::Step {
            line,
            stage,
            text: text.chars().take(1000).collect(),
            cached,
        };
        Ok(self.events.tell(event).await?)
    }

    async fn instruction(
        &mut self,
        state: &mut State,
        instruction: &Instruction,
    ) -> Result<(), BuildError> {
        let escape = self.file.escape;
        let expanded = instruction.expanded(escape, &|name| state.variable(name))?;
        let line = instruction.line;
        match expanded.kind {
            Kind::Run(step) => {
                let key = self.run_key(state, &step, line).await?;
                self.step(state, instruction, key, Step::Run(step)).await
            }
            Kind::Copy(copy) => self.copy(state, instruction, copy).await,
            Kind::Arg(all) => {
                for (name, default) in all {
                    let given = self.wish.args.get(&name).cloned();
                    let value = given.or(default).or_else(|| self.globals.get(&name).cloned());
                    if let Some(value) = value {
                        state.args.insert(name, value);
                    }
                }
                Ok(())
            }
            Kind::Workdir(path) => {
                let path = state.config.absolute(&path);
                state.folders.push(path.clone());
                state.config.workdir = Some(path);
                Ok(())
            }
            other => {
                configure(&mut state.config, other, line)?;
                Ok(())
            }
        }
    }

    /// Everything that the result of a command depends on.
    async fn run_key(
        &mut self,
        state: &State,
        step: &RunStep,
        line: u32,
    ) -> Result<Value, BuildError> {
        let mut mounts = Vec::new();
        for mount in &step.mounts {
            let content = match &mount.kind {
                MountKind::Bind {
                    from: None, source, ..
                } => {
                    let (sources, _) = mounts::bind_sources(self.context, source, line)?;
                    copy::digest(&sources)
                }
                MountKind::Bind {
                    from: Some(from), ..
                } => json!(self.source(state, from).await?.key.hex()),
                // The content of caches and secrets does not count.
                _ => Value::Null,
            };
            mounts.push(json!([format!("{mount:?}"), content]));
        }
        Ok(json!({
            "run": format!("{:?}", step.command),
            "argv": state.config.argv(&step.command),
            "env": state.config.env,
            "args": state.args,
            "user": state.config.user,
            "folder": state.config.folder(),
            "network": format!("{:?}", step.network),
            "policy": format!("{:?}", self.wish.network),
            "mounts": mounts,
        }))
    }

    /// The state that `--from` names: an earlier stage or an image.
    async fn source(&mut self, state: &State, from: &str) -> Result<Base, BuildError> {
        if let Some(index) = self.file.stage(from, state.stage) {
            return Ok(self.stage(index).await?.0);
        }
        Ok(self.bases().image(from, self.events).await?)
    }

    async fn copy(
        &mut self,
        state: &mut State,
        instruction: &Instruction,
        copy: Copy,
    ) -> Result<(), BuildError> {
        let line = instruction.line;
        let invalid = |problem: forkd_dockerfile::Problem| {
            BuildError::at(line, ErrorCode::UnsupportedInstruction, problem)
        };
        let about = json!({
            "to": state.config.absolute(&copy.to),
            "as": copy.to.ends_with('/'),
            "owner": copy.chown,
            "mode": copy.mode().map_err(invalid)?,
            "unpack": copy.unpack,
        });
        let Some(from) = copy.from.clone() else {
            let sources = copy::select(self.context, &copy, line)?;
            let key = json!(["copy", about, copy::digest(&sources)]);
            let step = Step::Files { copy, sources };
            return self.step(state, instruction, key, step).await;
        };
        if !copy.exclude.is_empty() {
            let message = "COPY --exclude works on files of the context, not with --from";
            return Err(BuildError::at(
                line,
                ErrorCode::UnsupportedInstruction,
                message,
            ));
        }
        let from = self.source(state, &from).await?;
        let paths: Vec<&CopySource> = copy.sources.iter().collect();
        let key = json!(["copy", about, from.key.hex(), format!("{paths:?}")]);
        self.step(state, instruction, key, Step::Stage { copy, from })
            .await
    }

    /// Finds the result of a step in the cache, or carries it out and keeps its result.
    async fn step(
        &mut self,
        state: &mut State,
        instruction: &Instruction,
        key: Value,
        step: Step,
    ) -> Result<(), BuildError> {
        let line = instruction.line;
        let key = state.base.0.then(&json!([state.folders, key]));
        let tag = key.tag();
        let cached = !self.wish.no_cache && cache::has(self.app, &self.wish.owner, &tag).await?;
        self.tell(line, state.stage, &instruction.text, cached).await?;
        state.steps += 1;
        if state.steps > MAX_STEPS {
            let message = format!("a build has at most {MAX_STEPS} steps that change files in a row");
            return Err(BuildError::at(line, ErrorCode::LimitReached, message));
        }
        if cached {
            self.cached += 1;
            if let Some(machine) = state.machine.take() {
                machine.end().await;
            }
        } else {
            self.ran += 1;
            let machine = match state.machine.take() {
                Some(machine) => machine,
                None => self.machine(&state.base.1, self.wish.network.clone()).await?,
            };
            let done = self.execute(state, &machine, &step, line).await;
            if let Err(error) = done {
                return Err(self.failed(machine, error).await);
            }
            cache::forget(self.app, &tag).await?;
            machine.cut(&tag).await?;
            cache::used(self.app, &tag).await?;
            state.machine = Some(machine);
        }
        state.base = (key, tag);
        state.folders.clear();
        Ok(())
    }

    async fn machine(&self, tag: &forkd_types::Tag, network: Policy) -> Result<Machine, Error> {
        Machine::start(
            self.app,
            tag,
            &self.wish.owner,
            network,
            self.wish.name.as_str(),
        )
        .await
    }

    /// Keeps the sandbox of a step that failed, unless the request says otherwise.
    async fn failed(&self, machine: Machine, mut error: BuildError) -> BuildError {
        let by_step = [ErrorCode::StepFailed, ErrorCode::FileNotFound];
        if self.wish.rm || !by_step.contains(&error.error.code()) {
            machine.end().await;
            return error;
        }
        match machine.keep().await {
            Ok(id) => {
                let hint = format!(
                    "`forkd shell {id}` enters the sandbox of the step, `forkd kill {id}` deletes it; it stays for an hour"
                );
                let message = format!("{} (sandbox {id})", error.error.chain());
                error.error = Error::hinted(error.error.code(), message, hint);
                error.sandbox = Some(id);
            }
            Err(why) => {
                tracing::warn!(error = why.chain(), "the sandbox of a failed step was not kept");
            }
        }
        error
    }

    async fn execute(
        &mut self,
        state: &State,
        machine: &Machine,
        step: &Step,
        line: u32,
    ) -> Result<(), BuildError> {
        for folder in &state.folders {
            machine.make_folder(folder).await?;
        }
        match step {
            Step::Folders => Ok(()),
            Step::Run(step) => self.execute_run(state, machine, step, line).await,
            Step::Files { copy, sources } => {
                let needs_folder = needs_folder(sources);
                let to = destination(machine, state, copy, needs_folder).await?;
                Ok(copy::send(machine, self.context, sources.clone(), &to).await?)
            }
            Step::Stage { copy, from } => {
                let paths: Vec<String> = copy
                    .sources
                    .iter()
                    .map(|source| match source {
                        CopySource::Path(path) => path.clone(),
                        CopySource::Inline { name, .. } => name.clone(),
                    })
                    .collect();
                let other = self.machine(&from.tag, Policy::none()).await?;
                let info = match paths.as_slice() {
                    [one] => other.stat(&crate::config::clean(one)).await?,
                    _ => None,
                };
                let is_file = info
                    .is_some_and(|info| info.kind != forkd_guest_proto::FileKind::Directory);
                let to = destination(machine, state, copy, !is_file).await?;
                copy::between(&other, &paths, machine, &to, line).await?;
                other.end().await;
                Ok(())
            }
        }
    }

    async fn execute_run(
        &mut self,
        state: &State,
        machine: &Machine,
        step: &RunStep,
        line: u32,
    ) -> Result<(), BuildError> {
        let mut mounted = Mounted::default();
        for mount in &step.mounts {
            let prepared = self.prepare(state, &mount.kind, mount.target.as_deref(), line).await?;
            mounted
                .add(machine, self.context, &state.config, mount, prepared, line)
                .await?;
        }
        let mut argv = state.config.argv(&step.command);
        if let Command::Script(text) = &step.command {
            let request = WriteRequest {
                path: SCRIPT.to_owned(),
                mode: Some(0o755),
                parents: true,
                ..WriteRequest::default()
            };
            let calls = machine.calls().await?;
            let written = calls.write_file(request, text.as_bytes()).await;
            written.map_err(Error::agent("the script could not be written"))?;
            argv = vec![SCRIPT.to_owned()];
        }
        let no_network = step.network == RunNetwork::None;
        if no_network {
            machine.set_network(Policy::none()).await?;
        }
        let all = state.args.iter().map(|(name, value)| (name, value));
        let all = all.chain(state.config.env.iter().map(|(name, value)| (name, value)));
        let all = all.chain(mounted.env.iter().map(|(name, value)| (name, value)));
        let request = ExecRequest {
            argv,
            env: all
                .map(|(name, value)| (name.clone(), Some(value.clone())))
                .collect(),
            cwd: Some(state.config.folder().to_owned()),
            user: Some(state.config.user.clone().unwrap_or_else(|| "0".to_owned())),
            ..ExecRequest::default()
        };
        let result = machine.run(self.events, request).await;
        machine.end_processes().await?;
        let status = match &result {
            Ok(done) => Some(done.status),
            Err(_) => None,
        };
        let success = status.is_some_and(|status| status.success());
        mounted
            .finish(self.app, machine, success, self.events)
            .await?;
        if no_network {
            machine.set_network(self.wish.network.clone()).await?;
        }
        match result {
            Ok(_) if success => Ok(()),
            Ok(done) => {
                let code = done.status.shell_code();
                let message = format!("the command ended with exit code {code}");
                let mut error = BuildError::at(line, ErrorCode::StepFailed, message);
                error.exit_code = Some(code);
                Err(error)
            }
            Err(error) => Err(not_run(error, line)),
        }
    }

    async fn prepare(
        &mut self,
        state: &State,
        kind: &MountKind,
        target: Option<&str>,
        line: u32,
    ) -> Result<Prepared, BuildError> {
        Ok(match kind {
            MountKind::Bind {
                from: None, source, ..
            } => {
                let (sources, is_folder) = mounts::bind_sources(self.context, source, line)?;
                Prepared::Context { sources, is_folder }
            }
            MountKind::Bind {
                from: Some(from),
                source,
                ..
            } => {
                let base = self.source(state, from).await?;
                Prepared::Stage {
                    machine: self.machine(&base.tag, Policy::none()).await?,
                    source: crate::config::clean(source),
                }
            }
            MountKind::Cache { id, .. } => {
                let id = id.clone().or_else(|| target.map(str::to_owned));
                let id = id.unwrap_or_default();
                Prepared::Cache {
                    file: cache::mount_file(self.app, &self.wish.owner, &id),
                }
            }
            MountKind::Tmpfs { size_mib } => Prepared::Tmpfs {
                size_mib: *size_mib,
            },
            MountKind::Secret { id, .. } => Prepared::Secret {
                value: self.wish.secrets.get(id).cloned(),
            },
        })
    }
}

/// A command that could not be started is a failure of the step, with the exit code of a shell.
fn not_run(error: Error, line: u32) -> BuildError {
    let refused = match &error {
        Error::Agent {
            source: forkd_agent_client::Error::Agent(refused),
            ..
        } => Some(refused.message.clone()),
        _ => None,
    };
    match refused {
        Some(message) => {
            let mut error = BuildError::at(line, ErrorCode::StepFailed, message);
            error.exit_code = Some(127);
            error
        }
        None => BuildError::from(error).on(line),
    }
}

fn needs_folder(sources: &[copy::Source]) -> bool {
    match sources {
        [copy::Source::File { .. } | copy::Source::Inline { .. }] => false,
        _ => true,
    }
}

async fn destination(
    machine: &Machine,
    state: &State,
    copy: &Copy,
    needs_folder: bool,
) -> Result<Destination, BuildError> {
    // Checked when the key was made.
    let mode = copy.mode().ok().flatten();
    let path = state.config.absolute(&copy.to);
    let found =
        Destination::find(machine, path, &copy.to, needs_folder, copy.chown.clone(), mode).await?;
    Ok(found)
}

/// Instructions that change the configuration only.
fn configure(config: &mut Config, kind: Kind, line: u32) -> Result<(), BuildError> {
    match kind {
        Kind::Env(all) => {
            for (name, value) in all {
                config.set_env(&name, &value);
            }
        }
        Kind::Label(all) => config.labels.extend(all),
        Kind::Maintainer(text) => {
            config.labels.insert("maintainer".to_owned(), text);
        }
        Kind::Cmd(command) => config.cmd = config.argv(&command),
        Kind::Entrypoint(command) => {
            config.entrypoint = config.argv(&command);
            // Arguments of another program are of no use.
            config.cmd.clear();
        }
        Kind::Shell(argv) => config.shell = argv,
        Kind::User(user) => config.user = Some(user),
        Kind::StopSignal(signal) => config.stop_signal = Some(signal),
        Kind::Healthcheck(health) => config.set_healthcheck(&health),
        Kind::Volume(all) => config.volumes.extend(all),
        Kind::Expose(all) => {
            for text in all {
                let message = format!("{text:.40} is not a port such as 80 or 53/udp");
                let ports = ports(&text).ok_or_else(|| {
                    BuildError::at(line, ErrorCode::DockerfileInvalid, message)
                })?;
                config.ports.extend(ports);
            }
        }
        Kind::Run(_) | Kind::Copy(_) | Kind::Arg(_) | Kind::Workdir(_) => {}
    }
    Ok(())
}

/// `80`, `80/tcp`, `8000-8010/udp`.
fn ports(text: &str) -> Option<Vec<String>> {
    const MOST: u16 = 1024;
    let (range, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let protocol = protocol.to_ascii_lowercase();
    if !["tcp", "udp", "sctp"].contains(&protocol.as_str()) {
        return None;
    }
    let (low, high) = match range.split_once('-') {
        Some((low, high)) => (low.parse::<u16>().ok()?, high.parse::<u16>().ok()?),
        None => {
            let port = range.parse().ok()?;
            (port, port)
        }
    };
    if low > high || high - low > MOST {
        return None;
    }
    Some((low..=high).map(|port| format!("{port}/{protocol}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_parsed() {
        assert_eq!(ports("80").unwrap(), ["80/tcp"]);
        assert_eq!(ports("1-2/UDP").unwrap(), ["1/udp", "2/udp"]);
        for bad in ["", "x", "80/x", "3-1", "70000", "1-9999"] {
            assert_eq!(ports(bad), None, "{bad}");
        }
    }

    #[test]
    fn an_entrypoint_takes_the_command_of_the_base_away() {
        let mut config = Config {
            cmd: vec!["old".into()],
            ..Config::default()
        };
        let exec = Command::Exec(vec!["/app".into()]);
        configure(&mut config, Kind::Entrypoint(exec), 1).unwrap();
        assert!(config.cmd.is_empty());
        configure(&mut config, Kind::Cmd(Command::Shell("a b".into())), 1).unwrap();
        assert_eq!(config.cmd, ["/bin/sh", "-c", "a b"]);
    }
}
