//! `forkd node`: list and drain the hosts of a fleet.

use forkd_api::{ErrorCode, FleetNode, UpdateNode};
use forkd_rest_client::{Client, Error};

use crate::args::{NodeArgs, NodeCommand};
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::outcome::{self, Outcome};
use crate::table::table;
use crate::ui::Ui;

/// Runs `forkd node`.
pub fn run(args: NodeArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        match args.command {
            NodeCommand::Ls => {
                let all = nodes(&client).await.map_err(failed)?;
                if args.json {
                    ui.json(&all)?;
                } else {
                    let head = ["NAME", "STATE", "LOAD", "SANDBOXES", "FREE", "ADDRESS"];
                    ui.line(table(head, all.iter().map(row)))?;
                }
                Ok(Exit::OK)
            }
            NodeCommand::Drain { names } => set(&client, names, true, args.json, ui).await,
            NodeCommand::Undrain { names } => set(&client, names, false, args.json, ui).await,
        }
    })
}

/// The hosts of a gateway. A daemon alone is a list of one.
async fn nodes(client: &Client) -> Result<Vec<FleetNode>, Error> {
    match client.nodes().await {
        Err(Error::Refused { body, .. }) if body.code == ErrorCode::NoSuchRoute => {
            Ok(vec![FleetNode {
                url: client.target().to_string(),
                reachable: true,
                error: None,
                node: Some(client.node().await?),
            }])
        }
        found => found,
    }
}

async fn set(
    client: &Client,
    names: Vec<String>,
    draining: bool,
    json: bool,
    ui: &Ui,
) -> CliResult {
    let request = UpdateNode {
        draining: Some(draining),
    };
    let mut outcomes = Vec::with_capacity(names.len());
    for name in names {
        let result = match client.update_node_of(&name, &request).await {
            // A daemon alone goes by its own name.
            Err(Error::Refused { body, .. }) if body.code == ErrorCode::NoSuchRoute => {
                client.update_node(&request).await
            }
            result => result,
        };
        outcomes.push(Outcome::new(name, result.map(drop)));
    }
    outcome::show(&outcomes, json, ui)
}

fn row(one: &FleetNode) -> [String; 6] {
    let state = match (&one.node, one.reachable) {
        (Some(node), true) if node.draining => "draining".to_owned(),
        (_, true) => "ready".to_owned(),
        (_, false) => one.error.clone().unwrap_or_else(|| "lost".to_owned()),
    };
    let of = |text: &dyn Fn(&forkd_api::NodeInfo) -> String| {
        one.node.as_ref().map_or_else(|| "-".to_owned(), text)
    };
    [
        of(&|node| node.name.clone().unwrap_or_else(|| "-".to_owned())),
        state,
        of(&|node| format!("{}.{} %", node.load / 10, node.load % 10)),
        of(&|node| format!("{}/{}", node.sandboxes, node.max_sandboxes)),
        of(&|node| format!("{} MiB", node.free_mib)),
        one.url.clone(),
    ]
}
