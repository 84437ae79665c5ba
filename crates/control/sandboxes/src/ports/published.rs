//! Host ports that lead to a port of a guest.
//!
//! The owner of a sandbox opens and closes its host ports; the listeners end with the sandbox. Closing a host port breaks
//! its connections. The number of connections of one host port is bounded: more wait in the kernel's backlog.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use forkd_api::ErrorCode;
use parking_lot::{Mutex, MutexGuard};
use rustix::net::sockopt::set_socket_linger;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{dial, relay};
use crate::error::Error;
use crate::sandbox::SandboxHandle;

/// Connections of one host port at one time.
const CONNECTIONS: usize = 256;
/// How long to wait after a failed accept.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// A bound host port that does not accept connections yet.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    pub address: SocketAddr,
}

/// Binds a host port.
pub async fn bind(address: SocketAddr) -> Result<Listener, Error> {
    let bound = async {
        let socket = TcpListener::bind(address).await?;
        let address = socket.local_addr()?;
        Ok(Listener { socket, address })
    };
    bound.await.map_err(|error: io::Error| {
        Error::hinted(
            ErrorCode::PortInUse,
            format!("cannot publish a port on {address}: {error}"),
            "choose another host port, or 0 for a free one",
        )
    })
}

/// The host ports of one sandbox, by the port of the guest.
#[derive(Debug, Default)]
pub struct Published(Mutex<BTreeMap<u16, HostPort>>);

#[derive(Debug)]
struct HostPort {
    address: SocketAddr,
    /// Ends the listener and its connections.
    open: DropGuard,
    listening: JoinHandle<()>,
}

impl HostPort {
    /// Returns when the address is free again.
    async fn close(self) {
        drop(self.open);
        let _ = self.listening.await;
    }
}

impl Published {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u16, HostPort>> {
        self.0.lock()
    }

    /// The host address of a port.
    pub fn address(&self, port: u16) -> Option<SocketAddr> {
        self.lock().get(&port).map(|host| host.address)
    }

    /// Accepts connections from now on, in place of an earlier listener of the port.
    pub async fn open(&self, sandbox: &Arc<SandboxHandle>, port: u16, listener: Listener) {
        let close = CancellationToken::new();
        let accepting = accept(Arc::clone(sandbox), port, listener.socket, close.clone());
        let host = HostPort {
            address: listener.address,
            open: close.drop_guard(),
            listening: tokio::spawn(accepting),
        };
        let before = self.lock().insert(port, host);
        if let Some(before) = before {
            before.close().await;
        }
    }

    /// Closes the host port of a port. Its address is free when this returns.
    pub async fn close(&self, port: u16) {
        let open = self.lock().remove(&port);
        if let Some(open) = open {
            open.close().await;
        }
    }
}

async fn accept(
    sandbox: Arc<SandboxHandle>,
    port: u16,
    socket: TcpListener,
    close: CancellationToken,
) {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let one = async || {
        let permit = Arc::clone(&room).acquire_owned().await;
        let permit = permit.map_err(io::Error::other)?;
        let (client, _) = socket.accept().await?;
        Ok::<_, io::Error>((client, permit))
    };
    loop {
        let accepted = tokio::select! {
            () = close.cancelled() => return,
            () = sandbox.stop.cancelled() => return,
            accepted = one() => accepted,
        };
        let Ok((client, permit)) = accepted else {
            // Most likely out of descriptors: other connections give theirs back in time.
            tokio::time::sleep(ACCEPT_AGAIN).await;
            continue;
        };
        let (sandbox, close) = (Arc::clone(&sandbox), close.clone());
        tokio::spawn(async move {
            let _permit = permit;
            tokio::select! {
                () = close.cancelled() => {}
                () = carry(&sandbox, port, client) => {}
            }
        });
    }
}

/// Carries one connection. A connection that breaks is reset, so that a client does not take it for complete.
async fn carry(sandbox: &SandboxHandle, port: u16, mut client: TcpStream) {
    let _ = client.set_nodelay(true);
    let done = match dial(sandbox, port).await {
        Ok(guest) => relay(&mut client, guest).await,
        Err(error) => {
            tracing::debug!(sandbox = %sandbox.id, port, error = error.chain(), "not connected");
            Err(io::ErrorKind::ConnectionRefused.into())
        }
    };
    if done.is_err() {
        let _ = set_socket_linger(&client, Some(Duration::ZERO));
    }
}
