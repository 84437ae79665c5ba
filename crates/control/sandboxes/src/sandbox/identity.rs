//! Making a child a machine of its own.

use forkd_agent_client::{Client, Identified};
use forkd_guest_proto::{IdentityReport, IdentityRequest, NetworkRequest};
use forkd_types::SandboxId;

use crate::error::Error;
use crate::launch::random_mac;

/// Random bytes for the guest's generators.
const ENTROPY: usize = 64;

/// Gives the guest a new identity; when this returns, the child is ready.
pub async fn assume(client: &Client, id: &SandboxId) -> Result<IdentityReport, Error> {
    let request = IdentityRequest {
        machine_id: Some(hex::encode(rand::random::<[u8; 16]>())),
        network: Some(NetworkRequest {
            mac: Some(mac_text(random_mac())),
            ..NetworkRequest::default()
        }),
        ..fresh(id)
    };
    ask(client, id, request).await
}

/// Gives a guest that went back new random numbers and the right time; it stays the machine it is.
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
    let identified = client
        .identify(request)
        .await
        .map_err(Error::agent(format!(
            "sandbox {id} could not take its identity"
        )))?;
    let Identified {
        report,
        clock_within,
    } = identified;
    tracing::debug!(sandbox = %id, ?clock_within, "wall clock");
    for warning in &report.warnings {
        tracing::warn!(sandbox = %id, warning, "identity");
    }
    Ok(report)
}
