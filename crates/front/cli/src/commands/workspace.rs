//! `forkd workspace`: manages named sandboxes that can be suspended.

use forkd_api::{CreateWorkspace, WorkspaceInfo};

use crate::args::{WorkspaceArgs, WorkspaceCommand};
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::outcome::{self, Outcome};
use crate::table::table;
use crate::ui::Ui;

/// Runs `forkd workspace`.
pub fn run(args: WorkspaceArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let one = match args.command {
            WorkspaceCommand::Create {
                name,
                snapshot,
                per_child_netns,
                memory_limit,
                network,
            } => {
                let request = CreateWorkspace {
                    name,
                    snapshot_tag: snapshot,
                    per_child_netns,
                    memory_limit_mib: memory_limit.map(|size| u64::from(size.0)),
                    network: network.request(),
                };
                client.create_workspace(&request).await.map_err(failed)?
            }
            WorkspaceCommand::Suspend { name, diff } => client
                .suspend_workspace(&name, diff)
                .await
                .map_err(failed)?,
            WorkspaceCommand::Resume { name } => {
                client.resume_workspace(&name).await.map_err(failed)?
            }
            WorkspaceCommand::Delete { name } => {
                let result = client.delete_workspace(&name).await;
                return outcome::show(&[Outcome::new(name, result)], args.json, ui);
            }
            WorkspaceCommand::List => {
                let all = client.workspaces().await.map_err(failed)?;
                if args.json {
                    ui.json(&all)?;
                } else {
                    ui.line(table(
                        ["NAME", "STATUS", "SOURCE", "STATE", "SANDBOX"],
                        all.iter().map(row),
                    ))?;
                }
                return Ok(Exit::OK);
            }
        };
        if args.json {
            ui.json(&one)?;
        } else {
            ui.line(line(&one))?;
        }
        Ok(Exit::OK)
    })
}

fn status(one: &WorkspaceInfo) -> String {
    format!("{:?}", one.status).to_lowercase()
}

fn row(one: &WorkspaceInfo) -> [String; 5] {
    let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
    [
        one.name.clone(),
        status(one),
        one.source_snapshot_tag.clone(),
        or_dash(&one.current_state_tag),
        or_dash(&one.live_sandbox_id),
    ]
}

fn line(one: &WorkspaceInfo) -> String {
    let [name, status, source, state, live] = row(one);
    format!("{name} {status} source={source} state={state} live={live}")
}
