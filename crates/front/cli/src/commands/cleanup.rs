//! `forkd cleanup`: deletes failed sandboxes and unusable snapshots.

use forkd_api::{ErrorCode, SandboxState, SnapshotStatus};
use serde::Serialize;

use crate::args::CleanupArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::table::table;
use crate::ui::Ui;

/// A failed sandbox or an unusable snapshot.
#[derive(Debug, Serialize)]
struct Leftover {
    kind: &'static str,
    name: String,
    why: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<ErrorCode>,
}

impl Leftover {
    fn new(kind: &'static str, name: String, why: String) -> Self {
        Self {
            kind,
            name,
            why,
            error: None,
            code: None,
        }
    }
}

/// Runs `forkd cleanup`.
pub fn run(args: &CleanupArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let mut found = Vec::new();
        for sandbox in client.sandboxes().await.map_err(failed)? {
            if sandbox.state == SandboxState::Failed {
                let why = sandbox.error.map_or_else(String::new, |body| body.error);
                found.push(Leftover::new("sandbox", sandbox.id, why));
            }
        }
        for snapshot in client.snapshots().await.map_err(failed)? {
            if snapshot.status == SnapshotStatus::Failed {
                let why = snapshot.warning.unwrap_or_default();
                found.push(Leftover::new("snapshot", snapshot.tag, why));
            }
        }
        if args.yes {
            for one in &mut found {
                let removed = match one.kind {
                    "sandbox" => client.kill(&one.name).await,
                    _ => client.delete_snapshot(&one.name, false, true).await,
                };
                if let Err(error) = removed {
                    one.code = error.code();
                    one.error = Some(error.to_string());
                }
            }
        }
        show(&found, args, ui)?;
        let whole = found.iter().all(|one| one.error.is_none());
        Ok(if whole { Exit::OK } else { Exit::FAILURE })
    })
}

fn show(found: &[Leftover], args: &CleanupArgs, ui: &Ui) -> std::io::Result<()> {
    if args.json {
        return ui.json(&found);
    }
    if found.is_empty() {
        ui.aside("nothing to remove");
        return Ok(());
    }
    let rows = found.iter().map(|one| {
        let mark = match (&one.error, args.yes) {
            (Some(_), _) => "✗",
            (None, true) => "✓",
            (None, false) => "·",
        };
        let why = one.error.as_ref().unwrap_or(&one.why);
        [
            mark.to_owned(),
            one.kind.to_owned(),
            one.name.clone(),
            why.clone(),
        ]
    });
    ui.line(table(["", "WHAT", "NAME", "WHY"], rows))?;
    if !args.yes {
        ui.aside("nothing was deleted; `forkd cleanup --yes` deletes these");
    }
    Ok(())
}
