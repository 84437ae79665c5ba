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
use std::pin::Pin;
use std::sync::Arc;

use forkd_api::{BuildEvent, ErrorCode};
use forkd_dockerfile::{
    Copy, CopySource, Dockerfile, Instruction, Kind, MountKind, RunStep, expand, parse,
};
use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;
use forkd_types::{Policy, Tag};
use serde_json::{Value, json};

use crate::base::{Base, Bases};
use crate::cache;
use crate::config::Config;
use crate::context::Context;
use crate::copy;
use crate::error::BuildError;
use crate::events::Events;
use crate::key::Key;
use crate::machine::Machine;
use crate::mounts;
use crate::settings::configure;
use crate::wish::BuildWish;

/// Steps that change files, from the base to the result: a chain of snapshots has a limit.
const MAX_STEPS: usize = 56;
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
    pub app: &'a Arc<App>,
    pub wish: &'a BuildWish,
    pub context: &'a Context,
    pub events: &'a Events,
    file: Dockerfile,
    /// `ARG` above the first `FROM`.
    globals: BTreeMap<String, String>,
    /// Results of stages, with the number of steps that led to each.
    results: Vec<Option<(Base, usize)>>,
    ran: u32,
    cached: u32,
}

/// A stage under way.
pub struct State {
    stage: usize,
    pub config: Config,
    pub args: BTreeMap<String, String>,
    base: (Key, Tag),
    machine: Option<Machine>,
    pub folders: Vec<String>,
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

type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A step that changes files.
pub enum Step {
    Run(RunStep),
    Files {
        copy: Copy,
        sources: Vec<copy::Source>,
    },
    Stage {
        copy: Copy,
        from: Box<Base>,
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
        self.file
            .arguments
            .iter()
            .any(|(_, found, _)| found == name)
            || kinds.any(
                |kind| matches!(kind, Kind::Arg(all) if all.iter().any(|(found, _)| found == name)),
            )
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
    fn stage(&mut self, index: usize) -> BoxFuture<'_, Result<(Base, usize), BuildError>> {
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
        let (base, steps) = self
            .begin(index, &stage)
            .await
            .map_err(|e| e.on(stage.line))?;
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
            if let Err(error) = self.instruction(&mut state, instruction).await {
                if let Some(machine) = state.machine.take() {
                    machine.end().await;
                }
                return Err(error.on(instruction.line));
            }
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
            let value = expand(text, self.file.escape, &|name| {
                self.globals.get(name).cloned()
            });
            value.map_err(|error| BuildError::at(stage.line, ErrorCode::DockerfileInvalid, error))
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
                    let value = given
                        .or(default)
                        .or_else(|| self.globals.get(&name).cloned());
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
    pub async fn source(&mut self, state: &State, from: &str) -> Result<Base, BuildError> {
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
        self.step(
            state,
            instruction,
            key,
            Step::Stage {
                copy,
                from: Box::new(from),
            },
        )
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
        self.tell(line, state.stage, &instruction.text, cached)
            .await?;
        state.steps += 1;
        if state.steps > MAX_STEPS {
            let message =
                format!("a build has at most {MAX_STEPS} steps that change files in a row");
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
                None => {
                    self.machine(&state.base.1, self.wish.network.clone())
                        .await?
                }
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

    pub async fn machine(&self, tag: &Tag, network: Policy) -> Result<Machine, Error> {
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
                *error.error = Error::hinted(error.error.code(), message, hint);
                error.sandbox = Some(id);
            }
            Err(why) => {
                tracing::warn!(
                    error = why.chain(),
                    "the sandbox of a failed step was not kept"
                );
            }
        }
        error
    }
}
