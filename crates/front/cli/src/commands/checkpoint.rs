//! `forkd checkpoint`: makes, lists and deletes checkpoints of a sandbox.

use forkd_api::CheckpointRequest;

use crate::args::CheckpointArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::outcome::Outcome;
use crate::ui::Ui;

/// Runs `forkd checkpoint`.
pub fn run(args: CheckpointArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        if let Some(name) = &args.rm {
            client
                .drop_checkpoint(&args.id, name)
                .await
                .map_err(failed)?;
            if args.json {
                ui.json(&Outcome::new(name.clone(), Ok(())))?;
            }
            return Ok(Exit::OK);
        }
        if args.list {
            let all = client.checkpoints(&args.id).await.map_err(failed)?;
            if args.json {
                ui.json(&all)?;
            } else {
                for one in &all {
                    ui.line(format_args!("{}  {} KiB", one.name, one.bytes / 1024))?;
                }
            }
            return Ok(Exit::OK);
        }
        let request = CheckpointRequest { name: args.name };
        let made = client
            .checkpoint(&args.id, &request)
            .await
            .map_err(failed)?;
        if args.json {
            ui.json(&made)?;
            return Ok(Exit::OK);
        }
        if made.unchanged {
            ui.aside("nothing has changed since the last checkpoint");
        } else {
            ui.aside(format_args!(
                "the sandbox was paused for {:.1} ms",
                made.pause_us as f64 / 1000.0
            ));
        }
        ui.line(made.name)?;
        Ok(Exit::OK)
    })
}
