//! Gives a child the identity of a machine of its own, and a guest that was rolled back new random numbers.
//!
//! The agent thaws user processes as the last step of either. A guest whose random numbers could not be renewed is an
//! error: it would draw the same keys as its siblings.

use std::time::Duration;

use forkd_agent_client::{Client, Identified};
use forkd_api::ErrorCode;
use forkd_guest_proto::{IdentityReport, IdentityRequest, NetworkRequest};
use forkd_net_proto::{GATEWAY_ADDRESS, GUEST_ADDRESS, GUEST_PREFIX};
use forkd_types::SandboxId;

use super::handle::SandboxHandle;
use crate::agent_limits;
use crate::error::Error;
use crate::launch::{has_network_words, random_mac};

/// Random bytes for the guest's generators.
const ENTROPY: usize = 64;

/// Connects to a guest that was just started, gives it a new identity and thaws its processes, all in one exchange. When
/// this returns, the child is ready.
pub async fn assume(
    sandbox: &SandboxHandle,
    timeout: Duration,
) -> Result<(Client, IdentityReport), Error> {
    let id = &sandbox.id;
    let request = IdentityRequest {
        machine_id: Some(hex::encode(rand::random::<[u8; 16]>())),
        network: Some(network(&sandbox.record().source.cmdline)),
        ..fresh(id)
    };
    let (client, identified) = sandbox
        .wake(timeout, request, agent_limits::identity())
        .await
        .map_err(|error| sandbox.unreachable(&error))?;
    Ok((client, checked(id, identified)?))
}

/// Connects to a guest that was rolled back, gives it new random numbers and the right time, and thaws its processes, all
/// in one exchange. The guest keeps its names. Its connections to elsewhere are broken: the peers have gone on, so the
/// sequence numbers differ.
pub async fn renew(sandbox: &SandboxHandle, timeout: Duration) -> Result<Client, Error> {
    let id = &sandbox.id;
    let (client, identified) = sandbox
        .wake(timeout, fresh(id), agent_limits::identity())
        .await
        .map_err(|error| sandbox.unreachable(&error))?;
    checked(id, identified)?;
    Ok(client)
}

/// A new hardware address, and the rest of the network settings for a guest that was booted without them.
fn network(cmdline: &str) -> NetworkRequest {
    let mac = Some(mac_text(random_mac()));
    if has_network_words(cmdline) {
        return NetworkRequest {
            mac,
            ..NetworkRequest::default()
        };
    }
    let text = |octets: [u8; 4]| std::net::Ipv4Addr::from(octets).to_string();
    NetworkRequest {
        mac,
        address: Some(format!("{}/{GUEST_PREFIX}", text(GUEST_ADDRESS))),
        gateway: Some(text(GATEWAY_ADDRESS)),
        dns: vec![text(GATEWAY_ADDRESS)],
        ..NetworkRequest::default()
    }
}

fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

fn fresh(id: &SandboxId) -> IdentityRequest {
    IdentityRequest {
        generation: hex::encode(rand::random::<[u8; 16]>()),
        entropy: hex::encode(rand::random::<[u8; ENTROPY]>()),
        hostname: Some(id.to_string()),
        machine_id: None,
        unix_ns: None,
        network: None,
        hook_timeout_ms: None,
        keep_connections: false,
    }
}

/// Checks the report of a guest: one that shares random numbers with its siblings is an error.
fn checked(
    id: &SandboxId,
    identified: Result<Identified, forkd_agent_client::Error>,
) -> Result<IdentityReport, Error> {
    let identified = identified.map_err(Error::agent(format!(
        "sandbox {id} could not take its identity"
    )))?;
    let Identified {
        report,
        clock_within,
    } = identified;
    tracing::debug!(sandbox = %id, ?clock_within, thawed = report.thawed, "identity");
    if !report.reseeded {
        return Err(Error::refused(
            ErrorCode::AgentFailed,
            format!("sandbox {id} did not renew its random numbers"),
        ));
    }
    // A hook makes the child what it has to be: one that failed leaves a child that is not.
    if let Some(hook) = report.hooks.iter().find(|hook| hook.code != Some(0)) {
        let how = match hook.code {
            Some(code) => format!("ended with exit code {code}"),
            None => "did not end in time".to_owned(),
        };
        return Err(Error::refused(
            ErrorCode::AgentFailed,
            format!(
                "sandbox {id} is not ready: its hook {} {how}: {}",
                hook.name,
                hook.output.trim()
            ),
        ));
    }
    for warning in &report.warnings {
        tracing::warn!(sandbox = %id, warning, "identity");
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_that_did_not_renew_its_random_numbers_is_refused() {
        let id: SandboxId = "sb-1".parse().unwrap();
        let identified = |reseeded| {
            Ok(Identified {
                report: IdentityReport {
                    reseeded,
                    ..IdentityReport::default()
                },
                clock_within: None,
            })
        };
        checked(&id, identified(true)).unwrap();
        let refused = checked(&id, identified(false)).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::AgentFailed);
    }

    #[test]
    fn a_child_whose_hook_failed_is_refused_with_its_output() {
        let id: SandboxId = "sb-1".parse().unwrap();
        let with = |code| {
            let hook = forkd_guest_proto::HookResult {
                name: "token".into(),
                code,
                wall_ms: 1,
                output: "no key\n".into(),
            };
            Ok(Identified {
                report: IdentityReport {
                    reseeded: true,
                    hooks: vec![hook],
                    ..IdentityReport::default()
                },
                clock_within: None,
            })
        };
        checked(&id, with(Some(0))).unwrap();
        let refused = checked(&id, with(Some(3))).unwrap_err().chain();
        assert!(
            refused.contains("token ended with exit code 3: no key"),
            "{refused}"
        );
        let late = checked(&id, with(None)).unwrap_err().chain();
        assert!(late.contains("did not end in time"), "{late}");
    }
}
