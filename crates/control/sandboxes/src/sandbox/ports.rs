//! The settings of a sandbox's ports, and its host ports.
//!
//! A host port is bound before the record names it, and serves when the record is durable. After a restart of the daemon
//! the host ports of the record are bound again; one that another program has taken meanwhile stays closed.

use std::sync::Arc;

use forkd_api::{ErrorCode, MAX_PORTS};

use super::handle::SandboxHandle;
use super::owner::SandboxOwner;
use crate::error::Error;
use crate::ports::{Listener, bind};
use crate::state::{PortRecord, PortsRecord};

/// A change of the settings of one port.
#[derive(Debug, Clone)]
pub enum PortChange {
    /// The port has these settings from now on.
    Set(u16, PortRecord),
    /// The port has no settings of its own any more.
    Forget(u16),
}

impl PortChange {
    /// Refuses a port more than a sandbox may have settings for.
    pub(super) fn check(&self, record: &PortsRecord) -> Result<(), Error> {
        match self {
            Self::Set(port, _)
                if record.ports.len() >= MAX_PORTS && !record.ports.contains_key(port) =>
            {
                Err(Error::refused(
                    ErrorCode::LimitReached,
                    format!("a sandbox has settings for at most {MAX_PORTS} ports"),
                ))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn apply(self, record: &mut PortsRecord) {
        match self {
            Self::Set(port, settings) => drop(record.ports.insert(port, settings)),
            Self::Forget(port) => drop(record.ports.remove(&port)),
        }
    }
}

/// The host port of a change, once the change is durable.
pub(super) struct HostPort {
    port: u16,
    change: HostPortChange,
}

enum HostPortChange {
    Open(Listener),
    Keep,
    Close,
}

impl HostPort {
    /// Binds the host port that a change asks for. Afterwards the change names the bound address.
    pub(super) async fn bound(
        sandbox: &SandboxHandle,
        change: &mut PortChange,
    ) -> Result<Self, Error> {
        let (port, settings) = match change {
            PortChange::Set(port, settings) => (*port, Some(settings)),
            PortChange::Forget(port) => (*port, None),
        };
        let wanted = settings.and_then(|settings| settings.host.as_mut());
        let Some(wanted) = wanted else {
            let change = HostPortChange::Close;
            return Ok(Self { port, change });
        };
        let fits = |open: &std::net::SocketAddr| {
            open.ip() == wanted.ip() && (wanted.port() == 0 || wanted.port() == open.port())
        };
        if let Some(open) = sandbox.published.address(port).filter(fits) {
            *wanted = open;
            let change = HostPortChange::Keep;
            return Ok(Self { port, change });
        }
        let listener = bind(*wanted).await?;
        *wanted = listener.address;
        let change = HostPortChange::Open(listener);
        Ok(Self { port, change })
    }

    /// Puts the change into force.
    pub(super) async fn settle(self, sandbox: &Arc<SandboxHandle>) {
        let published = &sandbox.published;
        match self.change {
            HostPortChange::Open(listener) => published.open(sandbox, self.port, listener).await,
            HostPortChange::Keep => {}
            HostPortChange::Close => published.close(self.port).await,
        }
    }
}

impl SandboxOwner {
    /// Binds the host ports of a child that starts.
    pub(super) async fn bind_ports(&self) -> Result<Vec<(u16, Listener)>, Error> {
        let mut bound = Vec::new();
        for (port, settings) in self.sandbox.record().ports.ports {
            if let Some(host) = settings.host {
                bound.push((port, bind(host).await?));
            }
        }
        Ok(bound)
    }

    /// Serves the host ports of a child that runs.
    pub(super) async fn open_ports(&self, bound: Vec<(u16, Listener)>) {
        for (port, listener) in bound {
            let published = &self.sandbox.published;
            published.open(&self.sandbox, port, listener).await;
        }
    }

    /// Binds and serves the host ports of an adopted sandbox.
    pub(super) async fn open_ports_again(&self) {
        for (port, settings) in self.sandbox.record().ports.ports {
            let Some(host) = settings.host else { continue };
            match bind(host).await {
                Ok(listener) => self.open_ports(vec![(port, listener)]).await,
                Err(error) => {
                    tracing::warn!(sandbox = %self.sandbox.id, port, error = error.chain(), "not published again");
                }
            }
        }
    }
}
