//! Carries one step out in its machine.

use forkd_api::ErrorCode;
use forkd_dockerfile::{Command, Copy, CopySource, MountKind, RunNetwork, RunStep};
use forkd_guest_proto::{ExecRequest, FileKind, WriteRequest};
use forkd_sandboxes::error::Error;
use forkd_types::Policy;

use crate::cache;
use crate::config::clean;
use crate::copy::{self, Destination};
use crate::error::BuildError;
use crate::machine::Machine;
use crate::mounts::{self, Mounted, Prepared};
use crate::stage::{Builder, State, Step};

const SCRIPT: &str = "/.forkd-build/script";

impl Builder<'_> {
    pub async fn execute(
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
                    [one] => other.stat(&clean(one)).await?,
                    _ => None,
                };
                let is_file = info.is_some_and(|info| info.kind != FileKind::Directory);
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
            let prepared = self
                .prepare(state, &mount.kind, mount.target.as_deref(), line)
                .await?;
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
        let all = state.args.iter();
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
                    source: clean(source),
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
    !matches!(
        sources,
        [copy::Source::File { .. } | copy::Source::Inline { .. }]
    )
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
    let found = Destination::find(
        machine,
        path,
        &copy.to,
        needs_folder,
        copy.chown.clone(),
        mode,
    )
    .await?;
    Ok(found)
}
