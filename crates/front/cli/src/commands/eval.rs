//! `forkd eval`: evaluates code in the warm interpreter of a sandbox.

use forkd_api::EvalRequest;

use crate::args::EvalArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd eval`.
pub fn run(args: &EvalArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    let request = EvalRequest {
        interpreter: None,
        code: args.code.join(" "),
        timeout_secs: args.timeout_secs,
    };
    block_on(async {
        let done = client.eval_with(&args.id, &request).await.map_err(failed)?;
        if args.json {
            ui.json(&done)?;
            return Ok(if done.error.is_some() {
                Exit::FAILURE
            } else {
                Exit::OK
            });
        }
        ui.raw(done.stdout.as_bytes())?;
        if !done.stderr.is_empty() {
            eprint!("{}", done.stderr);
        }
        match done.error {
            Some(error) => {
                eprintln!("{}", done.traceback.as_deref().unwrap_or(&error).trim_end());
                Ok(Exit::FAILURE)
            }
            None => {
                if let Some(result) = done.result {
                    ui.line(result)?;
                }
                Ok(Exit::OK)
            }
        }
    })
}
