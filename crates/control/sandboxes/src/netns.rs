//! Network namespaces of children, for clients that look for a child at 10.42.0.2 inside a namespace of its own.
//!
//! With `per_child_netns` a child of a daemon that runs as root has a namespace `forkd-child-N` in `/run/netns`. The
//! address of the guest is one of the loopback interface there, and the daemon listens on it: on 8888 for the line-based
//! protocol of the published class, and on every port on which the guest listens, which leads to the guest through the
//! agent. The namespace has no other interface, so nothing in it reaches the host or the network.
//!
//! A file in the run directory reserves a name before the namespace exists. A daemon that dies leaves the file behind,
//! and the next one removes namespaces that no record names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use forkd_net_proto::{GUEST_ADDRESS, GUEST_PREFIX};
use forkd_types::SandboxId;
use futures::future::BoxFuture;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use thiserror::Error;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;

use crate::error::chain;
use crate::ports::{dial, listening, relay};
use crate::sandbox::SandboxHandle;

/// Where `ip netns` keeps namespaces.
const FOLDER: &str = "/run/netns";
const PREFIX: &str = "forkd-child-";
/// The port of the line-based protocol.
const LINE_PORT: u16 = 8888;
/// The largest number of a namespace.
const MAX_NUMBER: u32 = 100_000;
/// How often the listening ports of a guest are read.
const LOOK: Duration = Duration::from_secs(2);
/// How long to wait after a failed accept.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Serves one connection of the line-based protocol for a sandbox.
pub type LineServer = Arc<dyn Fn(SandboxId, TcpStream) -> BoxFuture<'static, ()> + Send + Sync>;

/// Why a namespace cannot be made.
#[derive(Debug, Error)]
pub enum NamespaceError {
    #[error("cannot use {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot run the program ip")]
    Program(#[source] io::Error),
    #[error("ip failed: {0}")]
    Refused(String),
    #[error("every number up to {MAX_NUMBER} is taken")]
    Full,
}

/// The namespaces of this daemon.
pub struct Namespaces {
    /// Files that reserve names.
    reserved: PathBuf,
    line: OnceLock<LineServer>,
}

impl std::fmt::Debug for Namespaces {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Namespaces")
            .field("reserved", &self.reserved)
            .finish_non_exhaustive()
    }
}

impl Namespaces {
    /// Reserves names in this folder.
    pub fn new(reserved: PathBuf) -> Self {
        Self {
            reserved,
            line: OnceLock::new(),
        }
    }

    /// Sets how connections of the line-based protocol are served. Later calls have no effect.
    pub fn set_line_server(&self, server: LineServer) {
        let _ = self.line.set(server);
    }

    /// Makes a namespace for a child and returns its name. A daemon that may not make one has none.
    pub async fn create(&self) -> Option<String> {
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        match self.try_create().await {
            Ok(name) => Some(name),
            Err(error) => {
                tracing::warn!(error = chain(&error), "no network namespace for a child");
                None
            }
        }
    }

    async fn try_create(&self) -> Result<String, NamespaceError> {
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| NamespaceError::Io { path, source }
        };
        std::fs::create_dir_all(&self.reserved).map_err(io(&self.reserved))?;
        for number in 1..=MAX_NUMBER {
            let name = format!("{PREFIX}{number}");
            let marker = self.reserved.join(&name);
            if path(&name).exists() {
                continue;
            }
            match File::create_new(&marker) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(io(&marker)(error)),
            }
            match set_up(&name).await {
                Ok(()) => return Ok(name),
                Err(error) => {
                    self.remove(&name).await;
                    return Err(error);
                }
            }
        }
        Err(NamespaceError::Full)
    }

    /// Removes a namespace that this daemon has made.
    pub async fn remove(&self, name: &str) {
        let marker = self.reserved.join(name);
        if !marker.exists() {
            return;
        }
        if path(name).exists()
            && let Err(error) = ip(&["netns", "delete", name], "").await
        {
            tracing::warn!(name, error = chain(&error), "the network namespace stays");
            return;
        }
        let _ = std::fs::remove_file(marker);
    }

    /// Removes the namespaces of an earlier daemon that no sandbox has.
    pub async fn keep_only(&self, used: &BTreeSet<String>) {
        let entries = std::fs::read_dir(&self.reserved).into_iter().flatten();
        for entry in entries.flatten() {
            if let Ok(name) = entry.file_name().into_string()
                && !used.contains(&name)
            {
                self.remove(&name).await;
            }
        }
    }

    /// Listens in the namespace of a sandbox until the sandbox ends.
    pub fn serve(&self, sandbox: &Arc<SandboxHandle>, name: &str) {
        let line = self.line.get().cloned();
        let (sandbox, name) = (Arc::clone(sandbox), name.to_owned());
        tokio::spawn(async move {
            let stop = sandbox.stop.clone();
            tokio::select! {
                () = stop.cancelled() => {}
                () = keep_listening(&sandbox, &name, line) => {}
            }
        });
    }
}

fn path(name: &str) -> PathBuf {
    Path::new(FOLDER).join(name)
}

async fn set_up(name: &str) -> Result<(), NamespaceError> {
    ip(&["netns", "add", name], "").await?;
    let address = Ipv4Addr::from(GUEST_ADDRESS);
    let lines = format!("address add {address}/{GUEST_PREFIX} dev lo\nlink set lo up\n");
    ip(&["-n", name, "-batch", "-"], &lines).await
}

async fn ip(args: &[&str], input: &str) -> Result<(), NamespaceError> {
    let mut child = tokio::process::Command::new("ip")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(NamespaceError::Program)?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that has ended early says why.
        let _ = stdin.write_all(input.as_bytes()).await;
    }
    let done = child.wait_with_output().await;
    let done = done.map_err(NamespaceError::Program)?;
    if done.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&done.stderr);
    Err(NamespaceError::Refused(text.trim().to_owned()))
}

/// Binds a port in a namespace, on a thread of its own that ends there.
async fn bind_in(name: &str, port: u16) -> io::Result<TcpListener> {
    let path = path(name);
    let (sender, bound) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let bind = || {
            let namespace = File::open(path)?;
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            let address = SocketAddr::from((GUEST_ADDRESS, port));
            let listener = std::net::TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            Ok::<_, io::Error>(listener)
        };
        let _ = sender.send(bind());
    });
    let bound = bound.await.map_err(io::Error::other)?;
    TcpListener::from_std(bound?)
}

async fn keep_listening(sandbox: &Arc<SandboxHandle>, name: &str, line: Option<LineServer>) {
    let mut open: BTreeMap<u16, AbortOnDropHandle<()>> = BTreeMap::new();
    loop {
        let mut wanted = BTreeSet::from([LINE_PORT]);
        if sandbox.phase().answers()
            && let Ok(client) = sandbox.agent().await
            && let Ok(found) = listening::list(&client).await
        {
            wanted.extend(found.into_keys());
        }
        open.retain(|port, _| wanted.contains(port));
        for port in wanted {
            if open.contains_key(&port) {
                continue;
            }
            match bind_in(name, port).await {
                Ok(listener) => {
                    let task = accept(Arc::clone(sandbox), port, listener, line.clone());
                    open.insert(port, AbortOnDropHandle::new(tokio::spawn(task)));
                }
                Err(error) => {
                    tracing::debug!(name, port, %error, "not listening in a namespace");
                }
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

async fn accept(
    sandbox: Arc<SandboxHandle>,
    port: u16,
    listener: TcpListener,
    line: Option<LineServer>,
) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_AGAIN).await;
            continue;
        };
        let sandbox = Arc::clone(&sandbox);
        let line = line.clone().filter(|_| port == LINE_PORT);
        tokio::spawn(async move {
            match line {
                Some(line) => line(sandbox.id.clone(), stream).await,
                None => {
                    if let Ok(guest) = dial(&sandbox, port).await {
                        let _ = relay(stream, guest).await;
                    }
                }
            }
        });
    }
}
