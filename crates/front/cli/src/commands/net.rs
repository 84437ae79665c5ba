//! `forkd net`: shows and changes the network of a sandbox.

use forkd_api::{FlowEntry, FlowInfo, NetworkInfo, NetworkLimits, NetworkRequest, UpdateNetwork};
use forkd_rest_client::Client;
use forkd_types::{Mode, Rule};
use serde::Serialize;

use crate::args::{NetArgs, NetCommand, NetworkArgs, joined};
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliError, CliResult, Exit};
use crate::signals::Stop;
use crate::table::table;
use crate::ui::Ui;

/// The answer of `show` with `--json`.
#[derive(Debug, Serialize)]
struct Shown {
    #[serde(flatten)]
    info: NetworkInfo,
    flows: Vec<FlowInfo>,
}

/// Runs `forkd net`.
pub fn run(args: NetArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    let json = args.json;
    block_on(async {
        match args.command {
            NetCommand::Show { id } => show(&client, &id, json, ui).await,
            NetCommand::Set {
                id,
                mode,
                allow,
                deny,
                inject,
            } => {
                let flags = NetworkArgs {
                    net: mode,
                    allow,
                    deny,
                    net_limit: Vec::new(),
                    inject,
                };
                // clap demands a mode or a rule.
                let none = NetworkRequest::Mode(Mode::None.to_string());
                let request = flags.request().unwrap_or(none);
                let set = client.set_network(&id, &request).await.map_err(failed)?;
                changed(&set, json, ui)
            }
            NetCommand::Allow { id, rules } => {
                let current = client.network(&id).await.map_err(failed)?;
                // The mode none takes no rules.
                let closed = current.policy.mode == Mode::None.as_str();
                let mode = closed.then(|| Mode::Custom.to_string());
                edit(&client, &id, mode, &rules, json, ui).await
            }
            NetCommand::Deny { id, rules } => edit(&client, &id, None, &rules, json, ui).await,
            NetCommand::Limit { id, limits } => {
                let request = UpdateNetwork {
                    limits: joined(&limits),
                    ..UpdateNetwork::default()
                };
                let set = client.edit_network(&id, &request).await.map_err(failed)?;
                changed(&set, json, ui)
            }
            NetCommand::Log { id, follow, denied } => {
                let mut stop = Stop::listen()?;
                tokio::select! {
                    done = log(&client, &id, follow, denied, json, ui) => done,
                    exit = stop.asked() => Ok(exit),
                }
            }
            NetCommand::Reset { id } => {
                client.reset_network(&id).await.map_err(failed)?;
                if !json {
                    ui.aside(format!("every connection of {id} is reset"));
                }
                Ok(Exit::OK)
            }
        }
    })
}

async fn show(client: &Client, id: &str, json: bool, ui: &Ui) -> CliResult {
    let info = client.network(id).await.map_err(failed)?;
    let flows = match info.attached {
        true => client.network_flows(id).await.map_err(failed)?,
        false => Vec::new(),
    };
    if json {
        ui.json(&Shown { info, flows })?;
        return Ok(Exit::OK);
    }
    describe(&info, ui)?;
    let counters = &info.counters;
    ui.line(format_args!(
        "traffic    {} bytes up, {} bytes down",
        counters.bytes_up, counters.bytes_down
    ))?;
    ui.line(format_args!(
        "flows      {} open, {} allowed, {} denied",
        info.open_flows, counters.flows, counters.denied
    ))?;
    ui.line(format_args!(
        "DNS        {} questions, {} denied",
        counters.dns, counters.dns_denied
    ))?;
    if !flows.is_empty() {
        let rows = flows.iter().map(|flow| {
            [
                flow.protocol.clone(),
                format!("{}:{}", flow.address, flow.port),
                flow.name.clone().unwrap_or_else(|| "-".into()),
                flow.up.to_string(),
                flow.down.to_string(),
                format!("{:.1}s", flow.age_ms as f64 / 1000.0),
            ]
        });
        ui.line(table(
            ["PROTOCOL", "DESTINATION", "NAME", "UP", "DOWN", "AGE"],
            rows,
        ))?;
    }
    Ok(Exit::OK)
}

fn describe(info: &NetworkInfo, ui: &Ui) -> std::io::Result<()> {
    ui.line(format_args!("mode       {}", info.policy.mode))?;
    for rule in &info.policy.rules {
        ui.line(format_args!("rule       {rule}"))?;
    }
    for rule in &info.floor {
        ui.line(format_args!("operator   {rule}"))?;
    }
    for (name, value) in given(&info.policy.limits) {
        ui.line(format_args!("limit      {name}={value}"))?;
    }
    if !info.attached {
        ui.line("engine     does not serve this sandbox: nothing is reachable")?;
    }
    Ok(())
}

/// The limits that differ from their defaults.
fn given(limits: &NetworkLimits) -> impl Iterator<Item = (&'static str, u32)> {
    let all = [
        ("connections", limits.connections),
        ("new_per_second", limits.new_per_second),
        ("dns_per_second", limits.dns_per_second),
        ("egress_mbit", limits.egress_mbit),
        ("ingress_mbit", limits.ingress_mbit),
        ("egress_mib_total", limits.egress_mib_total),
    ];
    all.into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
}

async fn edit(
    client: &Client,
    id: &str,
    mode: Option<String>,
    rules: &[Rule],
    json: bool,
    ui: &Ui,
) -> CliResult {
    let request = UpdateNetwork {
        mode,
        add: rules.iter().map(ToString::to_string).collect(),
        ..UpdateNetwork::default()
    };
    let info = client.edit_network(id, &request).await.map_err(failed)?;
    changed(&info, json, ui)
}

fn changed(info: &NetworkInfo, json: bool, ui: &Ui) -> CliResult {
    if json {
        ui.json(info)?;
    } else {
        describe(info, ui)?;
    }
    Ok(Exit::OK)
}

async fn log(
    client: &Client,
    id: &str,
    follow: bool,
    denied: bool,
    json: bool,
    ui: &Ui,
) -> CliResult {
    let mut entries = client.network_log(id, follow).await.map_err(failed)?;
    while let Some(entry) = entries.next().await.map_err(failed)? {
        if denied && entry.verdict != "denied" {
            continue;
        }
        let printed = match json {
            true => ui.json(&entry),
            false => ui.line(line(&entry)),
        };
        printed.map_err(CliError::from)?;
    }
    Ok(Exit::OK)
}

fn line(entry: &FlowEntry) -> String {
    let at = std::time::UNIX_EPOCH + std::time::Duration::from_millis(entry.at_unix_ms);
    let name = entry.name.as_ref().map(|name| format!(" {name}"));
    let rule = entry.rule.as_ref().map(|rule| format!(" ({rule})"));
    format!(
        "{} {:<7} {} {}:{}{} {}{} up={} down={} {}ms",
        humantime::format_rfc3339_seconds(at),
        entry.verdict,
        entry.protocol,
        entry.address,
        entry.port,
        name.unwrap_or_default(),
        entry.reason,
        rule.unwrap_or_default(),
        entry.up,
        entry.down,
        entry.duration_ms,
    )
}
