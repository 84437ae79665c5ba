//! `forkd quickstart`: shows what forkd does and measures it on this host.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use forkd_api::{BranchRequest, CreateSandboxes, ErrorCode, SandboxInfo};
use forkd_rest_client::{Client, Error};
use futures::StreamExt;

use super::children::end;
use super::own_snapshot::OwnSnapshot;
use crate::args::{DEFAULT_IMAGE, QuickstartArgs};
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliError, CliResult, Exit};
use crate::signals::Stop;
use crate::table::{bytes, table};
use crate::ui::Ui;

/// Tag of the snapshot of the default image.
const TAG: &str = "quickstart";
/// Label of the sandboxes that the command deletes at its end.
const LABEL: &str = "quickstart";
/// Requests that run at the same time.
const PARALLEL: usize = 16;

/// Polling interval for a snapshot that is still being written.
const PACE: Duration = Duration::from_millis(200);

/// Measurements, one per line.
type Rows = Vec<[String; 3]>;

/// One run. The parent snapshot stays; the branch and the labelled sandboxes are deleted at the end.
struct Tour {
    client: Client,
    /// Tag of the parent.
    tag: String,
    /// Tag of the branched child.
    branch: String,
    /// The value of [`LABEL`].
    run: String,
}

/// Runs `forkd quickstart`.
pub fn run(args: &QuickstartArgs, ui: &Ui) -> CliResult {
    let tour = Tour::new(connect(&args.daemon)?, &args.image);
    block_on(async {
        let mut stop = Stop::listen()?;
        let shown = tokio::select! {
            shown = tour.show(args, ui) => shown.map(|()| Exit::OK),
            exit = stop.asked() => Ok(exit),
        };
        if shown.as_ref().is_ok_and(|exit| *exit != Exit::OK) {
            ui.talk("interrupted: deleting sandboxes and branch");
        }
        // A second interrupt leaves the clean-up to the daemon.
        tokio::select! {
            () = tour.clean_up(ui) => {}
            _ = stop.asked() => {}
        }
        if let Ok(Exit::OK) = shown {
            next(&tour.tag, ui)?;
        }
        shown
    })
}

/// Tag of the parent of an image; that of the default image has no suffix.
fn parent_of(image: &str) -> String {
    if image == DEFAULT_IMAGE {
        TAG.to_owned()
    } else {
        format!("{TAG}-{image}")
    }
}

/// Prints commands to try next, with this program spelt so that they work.
fn next(tag: &str, ui: &Ui) -> std::io::Result<()> {
    let program = spelling();
    ui.line("next:")?;
    let commands = [
        (
            format!("{program} spawn --tag {tag} -n 3"),
            "fork three sandboxes that stay",
        ),
        (
            format!("{program} shell ID"),
            "open a shell in one; `ls` lists IDs",
        ),
        (format!("{program} kill --all"), "delete them"),
    ];
    let width = commands
        .iter()
        .map(|(text, _)| text.len())
        .max()
        .unwrap_or(0);
    for (command, what) in &commands {
        ui.line(format_args!("  {command:width$}   {what}"))?;
    }
    Ok(())
}

/// `forkd` if PATH finds this program, else the path that was typed.
fn spelling() -> String {
    let typed = std::env::args_os().next().map(PathBuf::from);
    let Some(typed) = typed.filter(|typed| typed.components().count() > 1) else {
        return "forkd".to_owned();
    };
    let here = std::env::current_dir().unwrap_or_default();
    let near = typed.strip_prefix(&here).unwrap_or(&typed);
    if found_in_path(&typed) {
        "forkd".to_owned()
    } else {
        near.display().to_string()
    }
}

fn found_in_path(program: &Path) -> bool {
    let Some(parent) = program.parent().and_then(|dir| dir.canonicalize().ok()) else {
        return false;
    };
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.canonicalize().is_ok_and(|dir| dir == parent))
}

fn time(time: Duration) -> String {
    let ms = time.as_secs_f64() * 1000.0;
    if ms < 10.0 {
        format!("{ms:.1} ms")
    } else if ms < 10_000.0 {
        format!("{ms:.0} ms")
    } else {
        format!("{:.1} s", ms / 1000.0)
    }
}

fn line(what: &str, took: Duration, note: &str) -> [String; 3] {
    [what.to_owned(), time(took), note.to_owned()]
}

fn indented(text: &str) -> String {
    let lines: Vec<String> = text.lines().map(|line| format!("  {line}")).collect();
    lines.join("\n")
}

impl Tour {
    fn new(client: Client, image: &str) -> Self {
        let run = std::process::id().to_string();
        Self {
            client,
            tag: parent_of(image),
            branch: format!("{TAG}-branch-{run}"),
            run,
        }
    }

    async fn show(&self, args: &QuickstartArgs, ui: &Ui) -> Result<(), CliError> {
        let version = self.client.version().await.map_err(failed)?;
        ui.talk(format_args!(
            "==> daemon {} at {}",
            version.version,
            self.client.target()
        ));
        let mut rows = Rows::new();
        ui.talk(format_args!(
            "==> a warm parent of {}, {} children of it",
            args.image, args.n
        ));
        let parent = OwnSnapshot::tagged(&self.tag, &args.image);
        let ((children, took), made) = parent
            .start(&self.client, ui, async || {
                self.spawn(&self.tag, args.n).await
            })
            .await?;
        check_started(&children)?;
        rows.push(match made {
            Some(took) => line("boot, warm up, freeze", took, "only the first time"),
            None => [
                "boot, warm up, freeze".into(),
                "-".into(),
                "done before".into(),
            ],
        });
        let each = took / u32::try_from(children.len()).unwrap_or(1).max(1);
        let note = format!("every agent answered; {} each", time(each));
        rows.push(line(
            &format!("fork {} children", children.len()),
            took,
            &note,
        ));
        self.show_children(&children, ui, &mut rows).await?;
        ui.line(format_args!(
            "\n{}\n",
            indented(&table(["WHAT", "TIME", ""], rows))
        ))?;
        Ok(())
    }

    async fn show_children(
        &self,
        children: &[SandboxInfo],
        ui: &Ui,
        rows: &mut Rows,
    ) -> Result<(), CliError> {
        ui.talk("==> evaluating different code in each child");
        let started = Instant::now();
        self.squares(children).await?;
        rows.push(line(
            "evaluate code in each",
            started.elapsed(),
            "all answers correct",
        ));
        let Some(first) = children.first() else {
            return Ok(());
        };
        self.client
            .eval(&first.id, "memory = 'of the branch'")
            .await
            .map_err(failed)?;
        ui.talk("==> branching the first child while it runs");
        let started = Instant::now();
        let request = BranchRequest {
            tag: Some(self.branch.clone()),
            ..BranchRequest::default()
        };
        let branch = self
            .client
            .branch(&first.id, &request)
            .await
            .map_err(failed)?;
        let pause = Duration::from_micros(branch.pause_us.unwrap_or_default());
        let own = bytes(branch.diff_physical_bytes.unwrap_or_default());
        let note = format!("paused for {}; {own} stored", time(pause));
        rows.push(line("branch one", started.elapsed(), &note));
        self.grandchildren(rows).await
    }

    async fn squares(&self, children: &[SandboxInfo]) -> Result<(), CliError> {
        let answers: Vec<_> = futures::stream::iter(children.iter().enumerate())
            .map(|(number, child)| async move {
                let code = format!("seen = {number}; seen * seen");
                self.client.eval(&child.id, &code).await
            })
            .buffered(PARALLEL)
            .collect()
            .await;
        for (number, answer) in answers.into_iter().enumerate() {
            let result = answer.map_err(failed)?.result;
            if result.as_deref() != Some((number * number).to_string().as_str()) {
                return Err(anyhow!("child {number} answered {result:?}").into());
            }
        }
        Ok(())
    }

    async fn grandchildren(&self, rows: &mut Rows) -> Result<(), CliError> {
        let (children, took) = self.spawn(&self.branch, 2).await.map_err(failed)?;
        check_started(&children)?;
        rows.push(line(
            "fork 2 children of the branch",
            took,
            "they have its memory",
        ));
        for child in &children {
            let answer = self
                .client
                .eval(&child.id, "memory")
                .await
                .map_err(failed)?;
            if answer.result.as_deref() != Some("'of the branch'") {
                return Err(anyhow!("a child of the branch answered {:?}", answer.result).into());
            }
        }
        Ok(())
    }

    async fn spawn(&self, tag: &str, n: u32) -> Result<(Vec<SandboxInfo>, Duration), Error> {
        let started = Instant::now();
        let request = CreateSandboxes {
            snapshot_tag: tag.to_owned(),
            n,
            timeout_secs: Some(600),
            labels: BTreeMap::from([(LABEL.to_owned(), self.run.clone())]),
            ..CreateSandboxes::default()
        };
        let children = self.client.spawn(&request).await?;
        Ok((children, started.elapsed()))
    }

    /// Deletes the sandboxes and the branch, whatever exists of them. The daemon deletes sandboxes that this cannot reach
    /// when their lifetime is over.
    async fn clean_up(&self, ui: &Ui) {
        let mut ours = self.client.sandboxes().await.unwrap_or_default();
        ours.retain(|one| one.labels.get(LABEL) == Some(&self.run));
        end(&self.client, &ours).await;
        let removed = self.remove_branch().await;
        // Without a branch there is nothing to delete, and an unreachable daemon is already reported.
        if let Err(error) = removed
            && !matches!(error.code(), None | Some(ErrorCode::SnapshotNotFound))
        {
            ui.talk(format_args!(
                "snapshot {} was not deleted: {error}",
                self.branch
            ));
        }
    }

    /// Waits for a branch that is still being written, then deletes it.
    async fn remove_branch(&self) -> Result<(), Error> {
        loop {
            match self.client.delete_snapshot(&self.branch, false, true).await {
                Err(error) if error.code() == Some(ErrorCode::SnapshotNotReady) => {
                    tokio::time::sleep(PACE).await;
                }
                other => return other,
            }
        }
    }
}

fn check_started(children: &[SandboxInfo]) -> Result<(), CliError> {
    match children.iter().find_map(|child| child.error.as_ref()) {
        None => Ok(()),
        Some(body) => Err(anyhow!("a child did not start: {}", body.error).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_image_has_a_parent_of_its_own() {
        assert_eq!(parent_of("python-numpy"), "quickstart");
        assert_eq!(parent_of("alpine"), "quickstart-alpine");
    }
}
