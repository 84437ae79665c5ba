//! `forkd quickstart`: what forkd does, in one minute, with the numbers of this host.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use forkd_api::{BranchRequest, CreateSandboxes, SandboxInfo};
use forkd_client::{Client, Error};
use futures::StreamExt;

use super::own_snapshot::OwnSnapshot;
use crate::args::QuickstartArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliError, CliResult, Exit};
use crate::table::{bytes, table};
use crate::ui::Ui;

/// The snapshot it makes.
const TAG: &str = "quickstart";
/// Requests that are under way at once.
const PARALLEL: usize = 16;

/// What was measured: a line each.
type Rows = Vec<[String; 3]>;

/// Runs `forkd quickstart`.
pub fn run(args: &QuickstartArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let version = client.version().await.map_err(failed)?;
        ui.talk(format_args!(
            "==> daemon {} at {}",
            version.version,
            client.target()
        ));
        let mut rows = Rows::new();
        ui.talk(format_args!(
            "==> a warm parent of {}, {} children of it",
            args.image, args.n
        ));
        let parent = OwnSnapshot {
            tag: TAG,
            image: &args.image,
        };
        let ((children, took), made) = parent
            .start(&client, ui, async || spawn(&client, TAG, args.n).await)
            .await?;
        check_started(&client, &children).await?;
        rows.push(match made {
            Some(took) => line("boot, warm up, freeze", took, "once"),
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
        let shown = show(&client, &children, ui, &mut rows).await;
        end(&client, &children).await;
        shown?;
        ui.line(format_args!(
            "\n{}\n",
            indented(&table(["WHAT", "TIME", ""], rows))
        ))?;
        next(ui)?;
        Ok(Exit::OK)
    })
}

/// What to type next, with this program spelt so that it can be.
fn next(ui: &Ui) -> std::io::Result<()> {
    let program = spelling();
    ui.line("next:")?;
    let commands = [
        (
            format!("{program} spawn --tag {TAG} -n 3"),
            "three sandboxes that stay",
        ),
        (
            format!("{program} shell ID"),
            "look around in one; `ls` has the ids",
        ),
        (format!("{program} kill --all"), "end them"),
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

/// `forkd` where the search path leads here, else the path that was typed.
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

async fn spawn(client: &Client, tag: &str, n: u32) -> Result<(Vec<SandboxInfo>, Duration), Error> {
    let started = Instant::now();
    let request = CreateSandboxes {
        snapshot_tag: tag.to_owned(),
        n,
        wait: true,
        timeout_secs: Some(600),
        ..CreateSandboxes::default()
    };
    let children = client.spawn(&request).await?;
    Ok((children, started.elapsed()))
}

/// Ends all if one of them did not start.
async fn check_started(client: &Client, children: &[SandboxInfo]) -> Result<(), CliError> {
    match children.iter().find_map(|child| child.error.as_ref()) {
        None => Ok(()),
        Some(body) => {
            let error = anyhow!("a child did not start: {}", body.error);
            end(client, children).await;
            Err(error.into())
        }
    }
}

async fn show(
    client: &Client,
    children: &[SandboxInfo],
    ui: &Ui,
    rows: &mut Rows,
) -> Result<(), CliError> {
    ui.talk("==> each child computes something of its own");
    let started = Instant::now();
    squares(client, children).await?;
    rows.push(line(
        "ask each for another square",
        started.elapsed(),
        "all right",
    ));
    let Some(first) = children.first() else {
        return Ok(());
    };
    client
        .eval(&first.id, "memory = 'of the branch'")
        .await
        .map_err(failed)?;
    ui.talk("==> the first one is branched while it runs");
    let started = Instant::now();
    let branch = client
        .branch(&first.id, &BranchRequest::default())
        .await
        .map_err(failed)?;
    let pause = Duration::from_micros(branch.pause_us.unwrap_or_default());
    let own = bytes(branch.diff_physical_bytes.unwrap_or_default());
    let note = format!("it stood still for {}; {own} of its own", time(pause));
    rows.push(line("branch one", started.elapsed(), &note));
    let grand = grandchildren(client, &branch.tag, rows).await;
    client
        .delete_snapshot(&branch.tag, false, true)
        .await
        .map_err(failed)?;
    grand
}

async fn squares(client: &Client, children: &[SandboxInfo]) -> Result<(), CliError> {
    let answers: Vec<_> = futures::stream::iter(children.iter().enumerate())
        .map(|(number, child)| async move {
            let code = format!("seen = {number}; seen * seen");
            client.eval(&child.id, &code).await
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

async fn grandchildren(client: &Client, tag: &str, rows: &mut Rows) -> Result<(), CliError> {
    let (children, took) = spawn(client, tag, 2).await.map_err(failed)?;
    check_started(client, &children).await?;
    rows.push(line(
        "fork 2 children of the branch",
        took,
        "they know what it knew",
    ));
    let remembered = check_memory(client, &children).await;
    end(client, &children).await;
    remembered
}

async fn check_memory(client: &Client, children: &[SandboxInfo]) -> Result<(), CliError> {
    for child in children {
        let answer = client.eval(&child.id, "memory").await.map_err(failed)?;
        if answer.result.as_deref() != Some("'of the branch'") {
            return Err(anyhow!("a child of the branch answered {:?}", answer.result).into());
        }
    }
    Ok(())
}

/// Ends sandboxes. One that cannot be ended now is deleted by the daemon when its time is over.
pub async fn end(client: &Client, children: &[SandboxInfo]) {
    futures::stream::iter(children)
        .for_each_concurrent(PARALLEL, |child| async move {
            let _ = client.kill(&child.id).await;
        })
        .await;
}
