//! `forkd run`: runs a command in a new sandbox.
//!
//! The sandbox always has a lifetime: if this process is killed, the daemon deletes the sandbox. A command with input may
//! run longer than any timeout, so [`extended`] renews the lifetime while the command runs. `--keep` lifts it at the end.

use std::time::Duration;

use forkd_api::{CreateSandboxes, ExecResponse};
use forkd_rest_client::Client;
use serde::Serialize;

use super::children::set_lifetime;
use super::exec::{Mode, collected, exit_of, request, stream, terminal, with_input};
use super::image::image_for;
use super::own_snapshot::{OwnSnapshot, Shape};
use super::shell;
use crate::args::RunArgs;
use crate::daemon::{block_on, connect};
use crate::error::{CliError, CliResult};
use crate::signals::Stop;
use crate::ui::Ui;

/// Seconds that a sandbox may outlive the timeout of its command.
const SLACK_SECS: u64 = 60;
/// Lifetime of a sandbox whose command has no timeout. It is renewed at half of it.
const LEASE_SECS: u64 = 600;

/// The answer with `--json`.
#[derive(Debug, Serialize)]
struct Outcome {
    /// Only with `--keep`: otherwise the sandbox is gone.
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Option<String>,
    #[serde(flatten)]
    response: ExecResponse,
}

/// Runs `forkd run`.
pub fn run(args: &RunArgs, ui: &Ui) -> CliResult {
    let mode = Mode::of(&args.process, args.json);
    if mode == Mode::Terminal {
        shell::need_terminal("use -i instead of -t to pass input from a pipe or a file")?;
    }
    let client = connect(&args.daemon)?;
    block_on(async {
        let mut stop = Stop::listen()?;
        let id = tokio::select! {
            id = start(&client, args, mode, ui) => id?,
            // The daemon deletes a sandbox that starts in this moment when its lifetime is over.
            exit = stop.asked() => return Ok(exit),
        };
        let exit = tokio::select! {
            exit = command(&client, &id, args, mode, ui) => exit,
            exit = stop.asked() => Ok(exit),
            error = extended(&client, &id), if mode.has_input() => Err(error),
        };
        finish(&client, &id, args.keep, ui).await?;
        exit
    })
}

/// Starts the sandbox, from a snapshot that is made first if it is missing.
async fn start(client: &Client, args: &RunArgs, mode: Mode, ui: &Ui) -> Result<String, CliError> {
    let shape = Shape {
        vcpus: args.vcpus,
        memory: args.memory,
    };
    let asked = args.from.as_ref().unwrap_or(&args.image);
    let image = image_for(client, asked, &args.pull, ui).await?;
    let own = OwnSnapshot::for_run(&image, shape);
    let lifetime = if mode.has_input() {
        LEASE_SECS
    } else {
        args.timeout_secs.saturating_add(SLACK_SECS)
    };
    let request = CreateSandboxes {
        snapshot_tag: own.tag().to_owned(),
        limits: args.limits.request(),
        network: args.network.request(),
        timeout_secs: Some(lifetime),
        labels: args.labels.iter().cloned().collect(),
        volumes: args.volumes.volumes.clone(),
        ..CreateSandboxes::default()
    };
    let (children, _) = own
        .start(client, ui, async || client.spawn(&request).await)
        .await?;
    let id = children.first().map(|child| child.id.clone());
    Ok(id.unwrap_or_default())
}

async fn command(client: &Client, id: &str, args: &RunArgs, mode: Mode, ui: &Ui) -> CliResult {
    let request = request(&args.process, args.command.clone(), args.timeout_secs);
    match mode {
        Mode::Json => {
            let response = collected(client, id, &request).await?;
            let exit = exit_of(response.exit_code);
            let sandbox = args.keep.then(|| id.to_owned());
            ui.json(&Outcome { sandbox, response })?;
            Ok(exit)
        }
        Mode::Stream => stream(client, id, &request).await,
        Mode::Interactive => with_input(client, id, request).await,
        Mode::Terminal => shell::on_terminal(client, id, terminal(request)).await,
    }
}

/// Renews the lifetime of a sandbox until that fails.
async fn extended(client: &Client, id: &str) -> CliError {
    let mut due = tokio::time::interval(Duration::from_secs(LEASE_SECS / 2));
    due.tick().await;
    loop {
        due.tick().await;
        if let Err(error) = set_lifetime(client, id, LEASE_SECS).await {
            return error;
        }
    }
}

/// Deletes the sandbox, or keeps it and prints its ID.
async fn finish(client: &Client, id: &str, keep: bool, ui: &Ui) -> Result<(), CliError> {
    if keep {
        set_lifetime(client, id, 0).await?;
        ui.talk(format_args!(
            "sandbox {id} stays; `forkd kill {id}` deletes it"
        ));
    } else {
        // If the daemon cannot be asked, it deletes the sandbox when the lifetime is over.
        let _ = client.kill(id).await;
    }
    Ok(())
}
