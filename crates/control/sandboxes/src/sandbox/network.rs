//! The network of one sandbox: its frame socket and the policy in the engine.
//!
//! The record is the truth. A policy is durable before the engine gets it, and [`SandboxOwner::check_network`] brings the
//! engine to the policy of the record after either of them was restarted. While the engine does not serve a sandbox, no
//! packet of its guest goes anywhere.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use forkd_api::{InvalidNetwork, UpdateNetwork};
use forkd_types::{Mode, Policy};
use forkd_vmm_link::frame_pair;
use forkd_vmm_proto::{Capability, Command, NetAttachment, NetBackend};

use super::handle::SandboxHandle;
use super::owner::{SandboxOwner, quickly};
use crate::agent_limits;
use crate::error::Error;
use crate::launch::FdList;

/// How long the network of a guest waits for its agent after a loss of the engine.
const SOON: Duration = Duration::from_millis(500);

/// A change of the network policy.
#[derive(Debug, Clone)]
pub enum NetworkChange {
    /// This policy in place of the one in force.
    Replace(Policy),
    /// Changes to the policy in force.
    Edit(UpdateNetwork),
}

impl NetworkChange {
    /// The policy after the change.
    pub(super) fn applied(&self, to: &Policy) -> Result<Policy, InvalidNetwork> {
        match self {
            Self::Replace(policy) => Ok(policy.clone()),
            Self::Edit(edit) => edit.applied(to),
        }
    }
}

/// Both ends of the frame socket of a child that starts.
pub(super) struct FrameSocket {
    pub vmm: OwnedFd,
    engine: OwnedFd,
}

impl SandboxOwner {
    /// A frame socket for a VM that starts; `None` if no engine can serve it.
    pub(super) fn frame_socket(&self) -> Result<Option<FrameSocket>, Error> {
        let usable = self.vmm.capabilities().contains(Capability::SetNet);
        if !usable || !self.app.net.is_installed() {
            return Ok(None);
        }
        let (vmm, engine) = frame_pair().map_err(Error::io("make", "a frame socket"))?;
        Ok(Some(FrameSocket { vmm, engine }))
    }

    /// Gives the engine its end of the socket and the policy of the record.
    pub(super) async fn attach(&self, frames: &FrameSocket) -> Result<(), Error> {
        let network = self.sandbox.record().network;
        let id = &self.sandbox.id;
        Ok(self
            .app
            .net
            .attach(id, network.policy(), network.generation, &frames.engine)
            .await?)
    }

    /// Connects a VM that runs to the engine through a new frame socket. Connections through an earlier one end.
    async fn attach_again(&self) -> Result<(), Error> {
        let Some(frames) = self.frame_socket()? else {
            return Ok(());
        };
        self.attach(&frames).await?;
        let mut fds = FdList::default();
        let backend = Some(NetAttachment {
            fd: fds.push(&frames.vmm),
            kind: NetBackend::Socket,
        });
        let fds = fds.finish()?;
        let set = self.vmm.run(Command::SetNet { backend }, &fds);
        quickly(set).await?.map_err(Error::vmm(
            "the network of the sandbox could not be connected",
        ))
    }

    /// Finishes the start of a child whose attachment failed. A policy that allows nothing needs no engine.
    pub(super) async fn attach_or_refuse(&self, attached: Result<(), Error>) -> Result<(), Error> {
        let Err(error) = attached else {
            return Ok(());
        };
        let id = &self.sandbox.id;
        tracing::warn!(sandbox = %id, error = error.chain(), "not attached; trying again");
        match self.attach_again().await {
            Err(error) if self.sandbox.record().network.policy().mode() != Mode::None => Err(error),
            Err(error) => {
                tracing::warn!(sandbox = %id, error = error.chain(), "the sandbox has no network");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Makes sure that the engine serves the sandbox with the policy of its record.
    pub(super) async fn check_network(&mut self) -> Result<(), Error> {
        let wanted = self.sandbox.record().network.generation;
        match self.app.net.stats(&self.sandbox.id).await? {
            Some(stats) if stats.generation == wanted => {}
            Some(_) => self.enforce_network().await?,
            None => self.replace_engine().await?,
        }
        match self.sandbox.record().network.inject.is_empty() {
            true => Ok(()),
            false => self.provide_secrets().await,
        }
    }

    /// Puts the policy of the record in force. Connections that it does not allow are reset when this returns.
    pub(super) async fn enforce_network(&mut self) -> Result<(), Error> {
        let network = self.sandbox.record().network;
        let (id, policy) = (&self.sandbox.id, network.policy());
        if self
            .app
            .net
            .set_policy(id, policy, network.generation)
            .await?
        {
            return Ok(());
        }
        self.replace_engine().await
    }

    /// Attaches a sandbox whose engine is gone to the one that runs.
    async fn replace_engine(&mut self) -> Result<(), Error> {
        self.connections_lost = true;
        // Before the guest has a network again: a connection that it opens then must not be broken.
        self.break_connections().await;
        self.attach_again().await
    }

    /// Asks the agent to break connections that ended with an earlier engine. The new engine does not know them, so a
    /// program that only waits for bytes would wait for ever. A guest that does not answer soon gets its network first;
    /// a guest that is paused is asked when it goes on.
    pub(super) async fn break_connections(&mut self) {
        if !self.connections_lost || !self.sandbox.phase().answers() {
            return;
        }
        self.connections_lost = false;
        let asked = tokio::spawn(ask_to_break(Arc::clone(&self.sandbox)));
        // The task goes on if the time is over.
        let _ = tokio::time::timeout(SOON, asked).await;
    }

    /// Ends every connection of the guest after a roll-back: the sequence numbers of the guest are old.
    pub(super) async fn reset_network(&self) {
        if !self.app.net.is_installed() {
            return;
        }
        // An engine that does not answer has no connection either.
        if let Err(error) = self.app.net.reset(&self.sandbox.id).await {
            let error = crate::error::chain(&error);
            tracing::warn!(sandbox = %self.sandbox.id, error, "connections not reset");
        }
    }
}

async fn ask_to_break(sandbox: Arc<SandboxHandle>) {
    let asked = async {
        let client = sandbox.agent().await?;
        let calls = client.by(agent_limits::answer());
        let what = format!("sandbox {} could not break its connections", sandbox.id);
        calls.reset_connections().await.map_err(Error::agent(what))
    };
    match asked.await {
        Ok(report) => {
            let count = report.connections_reset;
            tracing::info!(sandbox = %sandbox.id, count, "connections of a lost engine broken");
        }
        // The agent may be older than this request, or replaced by the guest.
        Err(error) => {
            tracing::warn!(sandbox = %sandbox.id, error = error.chain(), "connections not broken");
        }
    }
}
