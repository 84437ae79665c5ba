//! `forkd ports`: shows the ports of a sandbox, and sets who may use one.

use forkd_api::{PortInfo, PortSettings};
use forkd_rest_client::Client;

use crate::args::PortsArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::table::table;
use crate::ui::Ui;

/// Runs `forkd ports`.
pub fn run(args: &PortsArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let Some(port) = args.port else {
            let all = client.ports(&args.id).await.map_err(failed)?;
            return show(&all, args.json, ui);
        };
        if args.close {
            client.forget_port(&args.id, port).await.map_err(failed)?;
        } else if args.access.is_some() || args.publish.is_some() {
            set(&client, args, port).await?;
        }
        let info = client.port(&args.id, port).await.map_err(failed)?;
        if args.json {
            ui.json(&info)?;
            return Ok(Exit::OK);
        }
        show(std::slice::from_ref(&info), false, ui)?;
        if let Some(token) = &info.token {
            ui.line(format_args!("header     Forkd-Access-Token: {token}"))?;
        }
        Ok(Exit::OK)
    })
}

/// Changes the settings that were given, and keeps the others.
async fn set(client: &Client, args: &PortsArgs, port: u16) -> Result<(), crate::error::CliError> {
    let now = client.port(&args.id, port).await.map_err(failed)?;
    let settings = PortSettings {
        access: args.access.map_or(now.access, Into::into),
        host: args.publish.map(|host| host.to_string()).or(now.host),
    };
    let set = client.set_port(&args.id, port, &settings).await;
    set.map(drop).map_err(failed)
}

fn show(all: &[PortInfo], json: bool, ui: &Ui) -> CliResult {
    if json {
        ui.json(&all)?;
        return Ok(Exit::OK);
    }
    if all.is_empty() {
        ui.aside("no program in the sandbox listens on a port");
        return Ok(Exit::OK);
    }
    let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let rows = all.iter().map(|port| {
        [
            port.port.to_string(),
            or_dash(&port.address),
            port.access.as_str().to_owned(),
            or_dash(&port.host),
            port.url.clone().unwrap_or_else(|| port.path.clone()),
        ]
    });
    ui.line(table(["PORT", "LISTENS ON", "ACCESS", "HOST", "URL"], rows))?;
    Ok(Exit::OK)
}
