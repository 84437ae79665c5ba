//! Freezing the user processes of a guest around a cut.
//!
//! A process that runs at a cut would run in every child before the child has random numbers, names and a clock of its
//! own. [`FrozenSource`] freezes the processes of a source and thaws them when it is dropped, which is right at the
//! moment the source runs again. Children are thawed by the request that gives them their identity.

use forkd_agent_client::Client;
use forkd_guest_proto::FreezeRequest;
use forkd_types::SandboxId;

use crate::agent_limits;
use crate::error::{Error, chain};

/// User processes of a source, frozen. Thawed when this is dropped.
pub struct FrozenSource {
    client: Client,
    id: SandboxId,
}

impl FrozenSource {
    /// Freezes the user processes of a guest. On an error they run.
    pub async fn freeze(client: Client, id: &SandboxId) -> Result<Self, Error> {
        // Made first: an answer that is lost on its way leaves the processes frozen.
        let frozen = Self {
            client,
            id: id.clone(),
        };
        frozen
            .client
            .by(agent_limits::answer())
            .freeze(FreezeRequest::default())
            .await
            .map_err(Error::agent(format!(
                "the processes of sandbox {id} could not be frozen"
            )))?;
        Ok(frozen)
    }
}

impl Drop for FrozenSource {
    fn drop(&mut self) {
        let (client, id) = (self.client.clone(), self.id.clone());
        tokio::spawn(async move {
            if let Err(error) = client.by(agent_limits::answer()).thaw().await {
                tracing::error!(sandbox = %id, error = chain(&error), "the processes of the source stay frozen");
            }
        });
    }
}
