//! Network settings of the protocol as a policy, and a clear refusal of those that are not honoured.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use forkd_api::E2bNetwork;
use forkd_sandboxes::app::App;
use forkd_sandboxes::sandbox::{Changes, NetworkChange};
use forkd_types::Policy;

use super::Sent;
use super::owned::Owned;
use super::wire::Network;
use crate::e2b::error::{Answer, Refusal};
use crate::e2b::state::E2b;

/// The policy of a new sandbox. A request without network settings gets the default of the daemon.
pub fn policy(app: &App, network: Option<&Network>, internet: Option<bool>) -> Answer<Policy> {
    let wish = wish(network, internet)?;
    Ok(wish.unwrap_or_else(|| app.default_network()))
}

/// The policy that the settings ask for; none if they say nothing about it.
fn wish(network: Option<&Network>, internet: Option<bool>) -> Answer<Option<Policy>> {
    let network = network.cloned().unwrap_or_default();
    check(&network)?;
    let list = |list: Option<Vec<String>>| list.unwrap_or_default();
    let asked = E2bNetwork {
        allow_internet_access: internet,
        allow_out: list(network.allow_out),
        deny_out: list(network.deny_out),
        allow_public_traffic: network.allow_public_traffic,
    };
    if internet.is_none() && asked.allow_out.is_empty() && asked.deny_out.is_empty() {
        return Ok(None);
    }
    let policy = asked.policy();
    policy
        .map(Some)
        .map_err(|error| Refusal::bad(error.to_string()))
}

/// Refuses settings that no policy expresses.
fn check(network: &Network) -> Answer<()> {
    let unsupported = [
        (
            network
                .dns_servers
                .as_ref()
                .is_some_and(|all| !all.is_empty()),
            "network.dnsServers",
        ),
        (
            network.egress_proxy.as_ref().is_some_and(|v| !v.is_null()),
            "network.egressProxy",
        ),
        (
            network.mask_request_host.is_some(),
            "network.maskRequestHost",
        ),
        (
            network
                .https_ports
                .as_ref()
                .is_some_and(|all| !all.is_empty()),
            "network.httpsPorts",
        ),
        (
            network.rules.as_ref().is_some_and(|all| !all.is_empty()),
            "network.rules",
        ),
    ];
    match unsupported.iter().find(|(given, _)| *given) {
        Some((_, name)) => Err(Refusal::bad(format!("{name} is not supported by forkd"))),
        None => Ok(()),
    }
}

/// Changes the network policy of a running sandbox. It is durable and in force when this answers.
pub async fn update(
    State(e2b): State<Arc<E2b>>,
    owned: Owned,
    Sent(network): Sent<Network>,
) -> Answer<StatusCode> {
    let sandbox = owned.live()?;
    let policy = policy(&e2b.app, Some(&network), None)?;
    let changes = Changes {
        network: Some(NetworkChange::Replace(policy)),
        ..Changes::default()
    };
    sandbox.change(changes).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forkd_types::Mode;

    fn mode(text: &str, internet: Option<bool>) -> Answer<Option<Mode>> {
        let network = serde_json::from_str::<Network>(text).unwrap();
        Ok(wish(Some(&network), internet)?.map(|policy| policy.mode()))
    }

    #[test]
    fn settings_become_a_policy() {
        assert_eq!(mode("{}", None).unwrap(), None);
        assert_eq!(mode(r#"{"allowPublicTraffic":false}"#, None).unwrap(), None);
        assert_eq!(mode("{}", Some(true)).unwrap(), Some(Mode::Public));
        assert_eq!(mode("{}", Some(false)).unwrap(), Some(Mode::None));
        let closed = r#"{"denyOut":["0.0.0.0/0"],"allowOut":["203.0.113.1"]}"#;
        assert_eq!(mode(closed, None).unwrap(), Some(Mode::Custom));
    }

    #[test]
    fn settings_that_are_not_honoured_are_refused() {
        for bad in [
            r#"{"egressProxy":{"address":"x"}}"#,
            r#"{"rules":{"a":[]}}"#,
            r#"{"maskRequestHost":"x"}"#,
            r#"{"dnsServers":["203.0.113.1"]}"#,
            r#"{"allowOut":["name.example"]}"#,
        ] {
            assert!(mode(bad, None).is_err(), "{bad}");
        }
    }
}
