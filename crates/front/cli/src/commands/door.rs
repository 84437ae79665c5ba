//! The address at which the published `Sandbox` class looks for the agent of its child.
//!
//! The class runs `forkd fork -n 1` and then connects to `FORKD_TARGET`, or to 10.42.0.2:8888, once for each request.
//! `forkd fork` listens there and answers each request through the API of the daemon (`Client::serve_line`).
//!
//! Several `forkd fork` listen on one address at once (`SO_REUSEPORT`), and the kernel gives a connection to any of them.
//! The one that gets it looks for the process at the other end, and for the newest `forkd fork` that this process or one
//! of its ancestors has started. If that is another `forkd fork`, the connection is carried on to it over an abstract Unix
//! socket. Each `forkd fork` is therefore found by its parent alone, and nothing is left on disk.
//!
//! ```text
//! Sandbox (process A) ──► forkd fork of B ──Unix socket──► forkd fork of A ──daemon──► child of A
//! ```

use std::net::{Ipv4Addr, SocketAddr};
use std::os::linux::net::SocketAddrExt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};
use forkd_rest_client::Client;
use tokio::net::{TcpListener, TcpSocket, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::client_process;
use crate::error::CliError;
use crate::ui::Ui;

/// The variable that names the address.
const TARGET: &str = "FORKD_TARGET";
/// The address without that variable.
const DEFAULT: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(10, 42, 0, 2)), 8888);
/// The same as an address of the loopback interface, and the label of an address that a `forkd fork` has added.
const ADDRESS: &str = "10.42.0.2/32";
const LABEL: &str = "lo:forkd";
/// Connections that wait to be accepted.
const BACKLOG: u32 = 128;
/// How long a closing door waits for connections that it has accepted. They may be those of another `forkd fork`.
const FINISH: Duration = Duration::from_secs(10);
/// How often, and how long, another `forkd fork` is looked for that has just been started.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
const LOOK_FOR: Duration = Duration::from_secs(10);

/// A listener for connections to the child of this command.
pub struct Door {
    tasks: JoinSet<()>,
    closing: watch::Sender<bool>,
    child: watch::Sender<Option<String>>,
    local: SocketAddr,
}

struct Shared {
    client: Client,
    child: watch::Receiver<Option<String>>,
    local: SocketAddr,
}

impl Door {
    /// Listens at the address that the published class uses. Connections wait until the child is known. Without
    /// `FORKD_TARGET` a host on which the default address cannot be used has no door.
    pub async fn open(client: &Client, ui: &Ui) -> Result<Option<Self>, CliError> {
        let named = std::env::var(TARGET).ok().filter(|text| !text.is_empty());
        let local = match &named {
            None => DEFAULT,
            Some(text) => parse(text)?,
        };
        let mut bound = listen(local);
        if bound.is_err() && named.is_none() && rustix::process::geteuid().is_root() {
            // Another `forkd fork` may have added it at the same time.
            let _ = ip(&["address", "add", ADDRESS, "dev", "lo", "label", LABEL]).await;
            bound = listen(local);
        }
        let listener = match bound {
            Ok(listener) => listener,
            Err(error) if named.is_some() => {
                let error = anyhow!(error).context(format!("cannot listen on {TARGET}={local}"));
                return Err(CliError::from(error).with_hint("choose a free address of this host"));
            }
            Err(_) => {
                ui.aside(format!(
                    "the published Sandbox class does not find this child at {DEFAULT}: \
                     set {TARGET}=127.0.0.1:8888 for it and for this command"
                ));
                return Ok(None);
            }
        };
        let siblings = sibling_listener()?;
        let (child, receiver) = watch::channel(None);
        let (closing, is_closing) = watch::channel(false);
        let shared = Arc::new(Shared {
            client: client.clone(),
            child: receiver,
            local,
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(Arc::clone(&shared), listener, is_closing.clone()));
        tasks.spawn(accept_siblings(shared, siblings, is_closing));
        Ok(Some(Self {
            tasks,
            closing,
            child,
            local,
        }))
    }

    /// Lets connections through to the child.
    pub fn lead_to(&self, id: &str) {
        self.child.send_replace(Some(id.to_owned()));
    }

    /// Closes the door when the connections that it has accepted are done. The last one takes the address away that a
    /// `forkd fork` has added; the label tells it from an address that the host has anyway.
    pub async fn close(self) {
        let Self {
            mut tasks,
            closing,
            child,
            local,
        } = self;
        closing.send_replace(true);
        // Connections to a child that never started wait no longer.
        drop(child);
        let finished = async { while tasks.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(FINISH, finished).await;
        tasks.shutdown().await;
        let is_root = rustix::process::geteuid().is_root();
        if local == DEFAULT && is_root && !client_process::is_listened(DEFAULT) {
            let _ = ip(&["address", "flush", "dev", "lo", "label", LABEL]).await;
        }
    }
}

fn parse(text: &str) -> Result<SocketAddr, CliError> {
    let text = text.replace("localhost:", "127.0.0.1:");
    let parsed = text.parse();
    let parsed = parsed.with_context(|| format!("{TARGET}={text} is not ADDRESS:PORT"));
    parsed.map_err(|error| CliError::from(error).with_hint("write 127.0.0.1:8888, for example"))
}

fn listen(local: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = match local {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    socket.set_reuseport(true)?;
    socket.bind(local)?;
    socket.listen(BACKLOG)
}

async fn ip(args: &[&str]) -> std::io::Result<()> {
    let done = tokio::process::Command::new("ip")
        .args(args)
        .stdin(std::process::Stdio::null())
        .output();
    done.await.map(drop)
}

fn sibling_address(pid: u32) -> std::io::Result<std::os::unix::net::SocketAddr> {
    std::os::unix::net::SocketAddr::from_abstract_name(format!("forkd-fork-{pid}"))
}

fn sibling_listener() -> std::io::Result<UnixListener> {
    let address = sibling_address(std::process::id())?;
    let listener = std::os::unix::net::UnixListener::bind_addr(&address)?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Accepts connections until the door closes. Those that the kernel has already given to this listener are served, too:
/// closing the listener would reset them.
async fn accept(shared: Arc<Shared>, listener: TcpListener, mut closing: watch::Receiver<bool>) {
    let mut open = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            biased;
            accepted = listener.accept() => accepted,
            () = closed(&mut closing) => break,
        };
        let Ok((stream, peer)) = accepted else {
            continue;
        };
        let shared = Arc::clone(&shared);
        open.spawn(async move {
            let local = shared.local;
            let owner = tokio::task::spawn_blocking(move || client_process::fork_of(peer, local));
            match owner.await.ok().flatten() {
                Some(pid) if pid != std::process::id() => pass(pid, stream).await,
                _ => shared.serve(stream).await,
            }
        });
        while open.try_join_next().is_some() {}
    }
    drop(listener);
    while open.join_next().await.is_some() {}
}

/// Waits until the door closes.
async fn closed(closing: &mut watch::Receiver<bool>) {
    // A door that is gone without a word is closed, too.
    let _ = closing.wait_for(|closing| *closing).await;
}

/// Accepts connections that another `forkd fork` of the same user passes on.
async fn accept_siblings(
    shared: Arc<Shared>,
    listener: UnixListener,
    mut closing: watch::Receiver<bool>,
) {
    let own = rustix::process::geteuid().as_raw();
    let mut open = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            biased;
            accepted = listener.accept() => accepted,
            () = closed(&mut closing) => break,
        };
        let Ok((stream, _)) = accepted else {
            continue;
        };
        if !stream.peer_cred().is_ok_and(|peer| peer.uid() == own) {
            continue;
        }
        let shared = Arc::clone(&shared);
        open.spawn(async move { shared.serve(stream).await });
        while open.try_join_next().is_some() {}
    }
    drop(listener);
    while open.join_next().await.is_some() {}
}

/// Passes a connection on to another `forkd fork`, which may just have been started.
async fn pass(pid: u32, mut stream: tokio::net::TcpStream) {
    let found = tokio::time::timeout(LOOK_FOR, async {
        loop {
            match connect_sibling(pid).await {
                Ok(sibling) => return sibling,
                Err(_) => tokio::time::sleep(LOOK_AGAIN).await,
            }
        }
    });
    if let Ok(mut sibling) = found.await {
        let _ = tokio::io::copy_bidirectional(&mut stream, &mut sibling).await;
    }
}

async fn connect_sibling(pid: u32) -> std::io::Result<UnixStream> {
    let stream = std::os::unix::net::UnixStream::connect_addr(&sibling_address(pid)?)?;
    stream.set_nonblocking(true)?;
    let stream = UnixStream::from_std(stream)?;
    // The name could belong to another program.
    let peer = stream.peer_cred()?;
    let is_sibling = peer.pid() == i32::try_from(pid).ok();
    match is_sibling && peer.uid() == rustix::process::geteuid().as_raw() {
        true => Ok(stream),
        false => Err(std::io::ErrorKind::PermissionDenied.into()),
    }
}

impl Shared {
    async fn serve<S>(&self, mut stream: S)
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    {
        let mut child = self.child.clone();
        let Ok(id) = child.wait_for(Option::is_some).await.map(|id| id.clone()) else {
            return;
        };
        let id = id.unwrap_or_default();
        // A client that went away needs no answer.
        let _ = self.client.serve_line(&id, &mut stream).await;
    }
}
