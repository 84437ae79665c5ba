//! Sockets and connections.

use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use anyhow::{Context, bail};
use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::{ListenAddr, TlsFiles};

/// How long a client may take to send its headers.
const HEADERS: Duration = Duration::from_secs(30);
/// How long a TLS handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// The most bytes of headers.
const MAX_HEADERS: usize = 64 * 1024;
/// The most connections.
const MAX_CONNECTIONS: usize = 4096;

/// Who is at the other end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Peer {
    /// For the log.
    pub remote: String,
    /// A user of this host who needs no token, by name.
    pub trusted: Option<String>,
}

/// A socket that is bound.
#[derive(Debug)]
pub enum Bound {
    /// TCP.
    Tcp(TcpListener),
    /// A Unix socket.
    Unix(UnixListener),
}

/// The certificate in use; replaced when it is read again.
pub type Tls = Arc<RwLock<Arc<ServerConfig>>>;

/// Binds an address.
pub async fn bind(address: &ListenAddr) -> anyhow::Result<Bound> {
    match address {
        ListenAddr::Tcp(address) => Ok(Bound::Tcp(
            TcpListener::bind(address)
                .await
                .with_context(|| format!("cannot listen on {address}"))?,
        )),
        ListenAddr::Unix(path) => Ok(Bound::Unix(bind_unix(path)?)),
    }
}

fn bind_unix(path: &Path) -> anyhow::Result<UnixListener> {
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        bail!("another daemon listens on {}", path.display());
    }
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => std::fs::remove_file(path)
            .with_context(|| format!("{} is in the way", path.display()))?,
        Ok(_) => bail!("{} is in the way and is no socket", path.display()),
        Err(_) => {}
    }
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)
            .with_context(|| format!("cannot create {}", parent.display()))?;
    }
    let listener =
        UnixListener::bind(path).with_context(|| format!("cannot listen on {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))
        .with_context(|| format!("cannot protect {}", path.display()))?;
    Ok(listener)
}

/// Reads a certificate and its key.
pub fn load_tls(files: &TlsFiles) -> anyhow::Result<Arc<ServerConfig>> {
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(&files.cert)
        .and_then(Iterator::collect)
        .with_context(|| format!("cannot read the certificate {}", files.cert.display()))?;
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .with_context(|| format!("cannot read the key {}", files.key.display()))?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .context("TLS cannot be set up")?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .context("the certificate and the key do not belong together")?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Serves connections.
#[derive(Debug, Clone)]
pub struct Server {
    router: Router,
    tls: Option<Tls>,
    stop: CancellationToken,
    connections: TaskTracker,
    slots: Arc<Semaphore>,
}

impl Server {
    /// Nothing is accepted yet.
    pub fn new(router: Router, tls: Option<Tls>, stop: CancellationToken) -> Self {
        Self {
            router,
            tls,
            stop,
            connections: TaskTracker::new(),
            slots: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
        }
    }

    /// Accepts connections until the daemon is told to stop.
    pub async fn accept(self, bound: Bound) {
        loop {
            let Ok(slot) = Arc::clone(&self.slots).acquire_owned().await else {
                return;
            };
            let accepted = tokio::select! {
                () = self.stop.cancelled() => return,
                accepted = self.one(&bound, slot) => accepted,
            };
            if let Err(error) = accepted {
                // Out of descriptors, most likely: others give theirs back in time.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }

    /// Takes one connection, which has the slot until it ends.
    async fn one(&self, bound: &Bound, slot: OwnedSemaphorePermit) -> io::Result<()> {
        match bound {
            Bound::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                stream.set_nodelay(true)?;
                let peer = Peer {
                    remote: address.to_string(),
                    trusted: None,
                };
                match self
                    .tls
                    .as_ref()
                    .map(|tls| Arc::clone(&tls.read().unwrap_or_else(PoisonError::into_inner)))
                {
                    None => self.spawn(stream, peer, slot),
                    Some(config) => {
                        let server = self.clone();
                        self.connections.spawn(async move {
                            let _slot = slot;
                            let handshake = TlsAcceptor::from(config).accept(stream);
                            match tokio::time::timeout(HANDSHAKE, handshake).await {
                                Ok(Ok(stream)) => server.serve(stream, peer).await,
                                Ok(Err(error)) => tracing::debug!(%error, "no TLS"),
                                Err(_) => tracing::debug!("the TLS handshake took too long"),
                            }
                        });
                    }
                }
            }
            Bound::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let peer = unix_peer(stream.peer_cred().ok().map(|cred| cred.uid()));
                self.spawn(stream, peer, slot);
            }
        }
        Ok(())
    }

    fn spawn<S>(&self, stream: S, peer: Peer, slot: OwnedSemaphorePermit)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let server = self.clone();
        self.connections.spawn(async move {
            let _slot = slot;
            server.serve(stream, peer).await;
        });
    }

    async fn serve<S>(&self, stream: S, peer: Peer)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let service = tower::ServiceBuilder::new()
            .map_request(
                move |mut request: axum::http::Request<hyper::body::Incoming>| {
                    request.extensions_mut().insert(peer.clone());
                    request.map(axum::body::Body::new)
                },
            )
            .service(self.router.clone());
        let mut builder = Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADERS)
            .max_buf_size(MAX_HEADERS)
            .http2()
            .timer(TokioTimer::new())
            .max_header_list_size(MAX_HEADERS as u32);
        let connection = builder.serve_connection_with_upgrades(
            TokioIo::new(stream),
            TowerToHyperService::new(service),
        );
        tokio::pin!(connection);
        tokio::select! {
            _ = connection.as_mut() => return,
            () = self.stop.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        let _ = connection.await;
    }

    /// Waits until every connection has ended.
    pub async fn drained(&self) {
        self.connections.close();
        self.connections.wait().await;
    }
}

/// Root and the daemon's own user need no token: they could read it anyway.
fn unix_peer(uid: Option<u32>) -> Peer {
    let own = rustix::process::geteuid().as_raw();
    Peer {
        remote: "unix".to_owned(),
        trusted: uid
            .filter(|uid| *uid == 0 || *uid == own)
            .map(|uid| format!("uid:{uid}")),
    }
}
