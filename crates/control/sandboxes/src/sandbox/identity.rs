//! Gives a child the identity of a machine of its own, and a guest that was rolled back new random numbers.
//!
//! The agent thaws user processes as the last step of either. A guest whose random numbers could not be renewed is an
//! error: it would draw the same keys as its siblings.

use std::time::Duration;

use forkd_agent_client::{Client, Identified};
use forkd_api::ErrorCode;
use forkd_guest_proto::{IdentityReport, IdentityRequest, NetworkRequest};
use forkd_types::SandboxId;

use super::handle::SandboxHandle;
use crate::agent_limits;
use crate::error::Error;
use crate::launch::random_mac;

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
        network: Some(NetworkRequest {
            mac: Some(mac_text(random_mac())),
            ..NetworkRequest::default()
        }),
        ..fresh(id)
    };
    let (client, identified) = sandbox
        .wake(timeout, request, agent_limits::identity())
        .await
        .map_err(|error| sandbox.unreachable(&error))?;
    Ok((client, checked(id, identified)?))
}

/// Gives a guest that was rolled back new random numbers and the right time, and thaws its processes. The guest keeps
/// its names and connections.
pub async fn renew(client: &Client, id: &SandboxId) -> Result<IdentityReport, Error> {
    let request = IdentityRequest {
        keep_connections: true,
        ..fresh(id)
    };
    ask(client, id, request).await
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

async fn ask(
    client: &Client,
    id: &SandboxId,
    request: IdentityRequest,
) -> Result<IdentityReport, Error> {
    let identified = client.by(agent_limits::identity()).identify(request).await;
    checked(id, identified)
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
    for warning in &report.warnings {
        tracing::warn!(sandbox = %id, warning, "identity");
    }
    Ok(report)
}
