//! The network of sandboxes: questions about one, and the watch over the engine that serves all.
//!
//! [`keep`] starts the engine, connects again within a second after its end, and asks the owner of every sandbox to
//! compare the engine with its record. The owner attaches its sandbox again if the engine does not serve it.

use std::sync::Arc;
use std::time::Duration;

use forkd_api::{
    EventKind, FlowEntry, FlowInfo, NetworkCounters, NetworkInfo, NetworkPolicy, NetworkStatus,
};
use forkd_net_proto::{EndCause, FlowRecord, NetCounters, Reason, Verdict};
use forkd_types::Rule;
use forkd_vmm_link::{LogPage, NetEvent, NetNews};

use crate::app::App;
use crate::error::{Error, chain};
use crate::sandbox::{Ask, SandboxHandle};
use crate::state::NetworkRecord;

/// The pause before the engine is started again after a failed start.
const START_AGAIN: Duration = Duration::from_millis(500);
/// The pause before an owner whose queue is full is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// The pause before a sandbox is attached again on which the engine failed: a guest that can make the engine fail must
/// not keep it busy.
const ATTACH_AGAIN: Duration = Duration::from_secs(1);

/// The policy, counters and state of the network of a sandbox.
pub async fn info(app: &App, sandbox: &SandboxHandle) -> NetworkInfo {
    let network = sandbox.record().network;
    let stats = match app.net.is_installed() {
        true => app.net.stats(&sandbox.id).await.ok().flatten(),
        false => None,
    };
    NetworkInfo {
        policy: NetworkPolicy::from(&network.policy()),
        generation: network.generation,
        attached: stats.is_some(),
        floor: app.net.floor().iter().map(ToString::to_string).collect(),
        open_flows: stats.map_or(0, |stats| stats.open),
        counters: stats.map_or_else(NetworkCounters::default, |stats| shown(&stats.counters)),
    }
}

fn shown(counters: &NetCounters) -> NetworkCounters {
    NetworkCounters {
        bytes_up: counters.bytes_up,
        bytes_down: counters.bytes_down,
        flows: counters.flows,
        denied: counters.denied,
        dns: counters.dns,
        dns_denied: counters.dns_denied,
        resets: counters.resets,
        frames_dropped: counters.frames_dropped,
        limited: counters.limited,
    }
}

/// Open flows of a sandbox.
pub async fn flows(app: &App, sandbox: &SandboxHandle) -> Result<Vec<FlowInfo>, Error> {
    app.need_network()?;
    let flows = app.net.flows(&sandbox.id).await?;
    let shown = flows.into_iter().map(|flow| FlowInfo {
        protocol: flow.protocol.as_str().to_owned(),
        address: flow.address.to_string(),
        port: flow.port,
        name: flow.name,
        up: flow.up,
        down: flow.down,
        age_ms: flow.age_ms,
    });
    Ok(shown.collect())
}

/// A part of the flow log.
#[derive(Debug)]
pub struct Log {
    /// The oldest entries after the number that was asked for, as many as one answer of the engine holds.
    pub entries: Vec<FlowEntry>,
    /// The number of the newest entry. It is smaller than a known number if the log began anew.
    pub last: u64,
}

/// Entries of the flow log after a number.
pub async fn log(app: &App, sandbox: &SandboxHandle, after: u64) -> Result<Log, Error> {
    app.need_network()?;
    let LogPage {
        entries,
        lost,
        last,
    } = app.net.log(&sandbox.id, after).await?;
    let network = sandbox.record().network;
    let mut shown: Vec<FlowEntry> = entries
        .into_iter()
        .map(|flow| entry(flow, &network, app.net.floor()))
        .collect();
    if let Some(first) = shown.first_mut() {
        first.lost = lost;
    }
    Ok(Log {
        entries: shown,
        last,
    })
}

/// Ends every connection of a sandbox.
pub async fn reset(app: &App, sandbox: &SandboxHandle) -> Result<(), Error> {
    app.need_network()?;
    app.net.reset(&sandbox.id).await?;
    let detail = Some("on request".to_owned());
    app.events
        .tell(EventKind::NetworkReset, &sandbox.id, detail);
    Ok(())
}

/// The engine of this host. It is not started for this.
pub async fn status(app: &App) -> NetworkStatus {
    let asked = match app.net.is_installed() {
        true => Some(app.net.totals().await),
        false => None,
    };
    let (engine, sandboxes) = match asked {
        None => ("missing", 0),
        Some(Err(_)) => ("down", 0),
        Some(Ok((_, sandboxes))) => ("running", sandboxes),
    };
    let resolvers = match engine {
        "running" => app.net.resolvers().await.unwrap_or_default(),
        _ => Vec::new(),
    };
    NetworkStatus {
        isolation: match engine {
            "running" => app.net.isolation().await.ok(),
            _ => None,
        },
        engine: engine.to_owned(),
        resolvers: resolvers.iter().map(ToString::to_string).collect(),
        default: NetworkPolicy::from(&app.default_network()),
        floor: app.net.floor().iter().map(ToString::to_string).collect(),
        sandboxes,
    }
}

fn entry(flow: FlowRecord, network: &NetworkRecord, floor: &[Rule]) -> FlowEntry {
    let (reason, rule) = explain(&flow, network, floor);
    FlowEntry {
        number: flow.number,
        at_unix_ms: flow.unix_ms,
        protocol: flow.protocol.as_str().to_owned(),
        address: flow.address.to_string(),
        port: flow.port,
        name: flow.name,
        verdict: match flow.verdict {
            Verdict::Allowed => "allowed".to_owned(),
            Verdict::Denied => "denied".to_owned(),
        },
        reason,
        rule,
        up: flow.up,
        down: flow.down,
        duration_ms: flow.duration_ms,
        lost: 0,
    }
}

/// The reason of a verdict, and the rule behind it if the policy in force still has it.
fn explain(flow: &FlowRecord, network: &NetworkRecord, floor: &[Rule]) -> (String, Option<String>) {
    let current = flow.generation == network.generation;
    let reason = match flow.reason {
        Reason::Rule(index) => {
            let rule = network.rules.get(usize::from(index)).filter(|_| current);
            let text = format!("rule {} of the policy", u32::from(index) + 1);
            return (text, rule.cloned());
        }
        Reason::Floor(index) => {
            let rule = floor.get(usize::from(index)).map(ToString::to_string);
            return ("a rule of the operator".to_owned(), rule);
        }
        Reason::Default if current => format!("the mode {}", network.mode),
        Reason::Default => "the mode of an earlier policy".to_owned(),
        Reason::Group(group) => format!("the group {}", group.as_str()),
        Reason::NameMismatch => "the client named no allowed host".to_owned(),
        Reason::Limit => "a limit of the policy".to_owned(),
        Reason::Unreachable => "the destination refused or did not answer".to_owned(),
        Reason::Quota => "the limit egress_mib_total of the policy".to_owned(),
        Reason::SecretHost => "an injection: its host is reached over TLS by its name".to_owned(),
        Reason::NoBroker => "the broker of secrets, which does not answer".to_owned(),
    };
    (reason, None)
}

/// Keeps the engine running and every sandbox attached until the daemon stops.
pub async fn keep(app: Arc<App>) {
    let Some(mut connections) = app.net.connections() else {
        return;
    };
    if !app.net.is_installed() {
        let program = app.net.program().display();
        tracing::warn!(%program, "forkd-net is not installed: sandboxes can only have the network mode none");
        return;
    }
    connect(&app).await;
    loop {
        let mut news = tokio::select! {
            news = connections.recv() => match news {
                Some(news) => news,
                None => return,
            },
            () = app.stopping.cancelled() => return,
        };
        tokio::spawn(check_all(Arc::clone(&app)));
        tokio::select! {
            // A daemon that stops ends the engine and starts no other.
            biased;
            () = app.stopping.cancelled() => return,
            () = listen(&app, &mut news) => {}
        }
        app.net.disconnected();
        metrics::counter!("forkd_net_engine_restarts_total").increment(1);
        tracing::error!("forkd-net is gone; every connection of every sandbox is broken");
        connect(&app).await;
    }
}

/// Connects to the engine, as often as it takes.
async fn connect(app: &App) {
    while let Err(error) = app.net.connected().await {
        tracing::error!(error = chain(&error), "forkd-net cannot be started");
        tokio::select! {
            () = tokio::time::sleep(START_AGAIN) => {}
            () = app.stopping.cancelled() => return,
        }
    }
}

/// Handles the reports of one engine until it is gone.
async fn listen(app: &Arc<App>, news: &mut NetNews) {
    while let Some(event) = news.next().await {
        match event {
            NetEvent::Denied {
                id,
                flow,
                suppressed,
            } => {
                let Ok(sandbox) = app.sandboxes.get(&id) else {
                    continue;
                };
                let detail = denial(
                    &flow,
                    &sandbox.record().network,
                    app.net.floor(),
                    suppressed,
                );
                app.events.tell(EventKind::NetworkDenied, &id, Some(detail));
            }
            NetEvent::Ended {
                id,
                why: EndCause::Failed,
            } => {
                tracing::error!(sandbox = %id, "the network engine failed on a sandbox");
                let Ok(sandbox) = app.sandboxes.get(&id) else {
                    continue;
                };
                let detail = Some("the network engine failed on this sandbox".to_owned());
                app.events.tell(EventKind::NetworkReset, &id, detail);
                let app = Arc::clone(app);
                tokio::spawn(async move {
                    tokio::time::sleep(ATTACH_AGAIN).await;
                    check(&app, &sandbox).await;
                });
            }
            // The VM ended, or its sandbox has a newer socket.
            NetEvent::Ended { .. } => {}
        }
    }
}

fn denial(flow: &FlowRecord, network: &NetworkRecord, floor: &[Rule], suppressed: u64) -> String {
    let (reason, rule) = explain(flow, network, floor);
    let name = flow.name.as_ref().map(|name| format!(" ({name})"));
    let rule = rule.map(|rule| format!(": {rule}"));
    let more = (suppressed > 0).then(|| format!("; {suppressed} more before it"));
    format!(
        "{} {}:{}{} denied by {reason}{}{}",
        flow.protocol.as_str(),
        flow.address,
        flow.port,
        name.unwrap_or_default(),
        rule.unwrap_or_default(),
        more.unwrap_or_default(),
    )
}

/// Asks the owner of every sandbox to compare the engine with its record.
async fn check_all(app: Arc<App>) {
    let sandboxes = app.sandboxes.list();
    for sandbox in &sandboxes {
        check(&app, sandbox).await;
    }
    let is_known = |id: &_| app.sandboxes.get(id).is_ok();
    if let Err(error) = app.net.detach_unknown(is_known).await {
        tracing::debug!(error = chain(&error), "the engine went away again");
    }
}

async fn check(app: &App, sandbox: &SandboxHandle) {
    while let Err(error) = sandbox.ask(Ask::CheckNetwork) {
        let full = error.code() == forkd_api::ErrorCode::Busy;
        if !full || app.stopping.is_cancelled() {
            return;
        }
        tokio::time::sleep(ASK_AGAIN).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forkd_types::{Group, Mode, Policy, Protocol};

    #[test]
    fn a_denial_names_the_rule_that_decided() {
        let rule = "deny public:25".parse().unwrap();
        let policy = Policy::new(Mode::Public, vec![rule], Default::default()).unwrap();
        let network = NetworkRecord::first(&policy);
        let flow = |reason, generation| FlowRecord {
            number: 1,
            unix_ms: 0,
            generation,
            protocol: Protocol::Tcp,
            address: "203.0.113.9".parse().unwrap(),
            port: 25,
            name: Some("mail.example".into()),
            verdict: Verdict::Denied,
            reason,
            up: 0,
            down: 0,
            duration_ms: 0,
        };
        let text = |reason, generation| denial(&flow(reason, generation), &network, &[], 2);
        assert_eq!(
            text(Reason::Rule(0), 1),
            "tcp 203.0.113.9:25 (mail.example) denied by rule 1 of the policy: deny public:25; 2 more before it"
        );
        // The rules of an earlier policy are not known any more.
        assert!(!text(Reason::Rule(0), 7).contains("deny public"));
        assert!(text(Reason::Default, 1).contains("the mode public"));
        assert!(text(Reason::Group(Group::Private), 1).contains("the group private"));
    }
}
