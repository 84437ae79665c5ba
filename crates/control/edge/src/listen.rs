//! Listening sockets and the connections that they accept.
//!
//! [`bind`] makes a socket, [`Server::accept`] serves it. Limits that hold before a client has shown a token:
//!
//! - Each listener has a pool of connections of its own, so clients of a TCP port never take the slots of the Unix
//!   socket. A full pool leaves new connections in the kernel's backlog.
//! - One remote address (IPv6: one /64) has at most [`Limits::per_peer`] connections; more are closed at once.
//! - A connection on which no request is in flight has a deadline:
//!
//! ```text
//!  accepted ──first byte──▶ sending headers ──request──▶ in flight ◀──request── idle
//!     │ first_byte              │ headers                (no deadline) ──end──▶  │ idle
//!     ▼                         ▼                                                ▼
//!   closed                    closed                                           closed
//! ```
//!
//! The deadline counts from the last change of state and not from the last byte, so a client cannot extend it byte by
//! byte. A peer that vanishes while a request is in flight is found by TCP keep-alive, `TCP_USER_TIMEOUT` and HTTP/2 pings.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use anyhow::{Context, bail};
use axum::Router;
use axum::body::Body;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use parking_lot::{Mutex, MutexGuard, RwLock};
use rustix::fs::{Mode, fchmod};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use crate::stream::holding;

/// The most bytes of headers.
const MAX_HEADERS: usize = 64 * 1024;
/// Requests in flight on one HTTP/2 connection.
const MAX_STREAMS: u32 = 128;
/// How often an HTTP/2 client is pinged, and how long its answer may take.
const PING: Duration = Duration::from_secs(20);
/// How long sent bytes may stay unacknowledged before the kernel drops a TCP connection.
const UNACKNOWLEDGED: Duration = Duration::from_secs(60);
/// Idle time before the first TCP keep-alive probe.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
/// Time between TCP keep-alive probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Unanswered probes after which the kernel drops a TCP connection.
const KEEPALIVE_PROBES: u32 = 3;
/// Connections that the kernel keeps until they are accepted.
const BACKLOG: i32 = 1024;

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenAddr {
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

/// A certificate and its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificate chain in PEM.
    pub cert: PathBuf,
    /// Private key in PEM.
    pub key: PathBuf,
}

/// Limits on connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections of each TCP listener.
    pub tcp: usize,
    /// Connections of each Unix socket.
    pub unix: usize,
    /// TCP connections of one remote address.
    pub per_peer: usize,
    /// How long a TLS handshake may take.
    pub handshake: Duration,
    /// From the connection to its first byte.
    pub first_byte: Duration,
    /// From the first byte to a complete request.
    pub headers: Duration,
    /// From the end of a response to the next request.
    pub idle: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            tcp: 4096,
            unix: 1024,
            per_peer: 1024,
            handshake: Duration::from_secs(10),
            first_byte: Duration::from_secs(10),
            headers: Duration::from_secs(30),
            idle: Duration::from_secs(120),
        }
    }
}

impl Limits {
    /// Leaves descriptors for the Unix socket and for sandboxes: a TCP listener that used them all up would shut every
    /// other door too. `descriptors` is the process's limit.
    #[must_use]
    pub fn within(self, descriptors: u64, tcp_listeners: usize) -> Self {
        let half = usize::try_from(descriptors / 2).unwrap_or(usize::MAX);
        let tcp = self.tcp.min((half / tcp_listeners.max(1)).max(1));
        Self {
            tcp,
            per_peer: self.per_peer.min(tcp.div_ceil(2)),
            ..self
        }
    }
}

/// The client at the other end of a connection.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Peer {
    /// For the log.
    pub remote: String,
    /// The address, if the client came over TCP.
    pub address: Option<IpAddr>,
    /// A user of this host who needs no token, by name.
    pub trusted: Option<String>,
}

impl Peer {
    /// The key under which limits count a peer: one host usually has a whole IPv6 /64.
    pub fn key(&self) -> Option<IpAddr> {
        self.address.map(peer_key)
    }
}

fn peer_key(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => {
            let mut segments = v6.segments();
            segments[4..].fill(0);
            IpAddr::V6(Ipv6Addr::from(segments))
        }
        v4 => v4,
    }
}

/// A bound socket.
#[derive(Debug)]
pub enum Bound {
    Tcp(TcpListener),
    /// A Unix socket.
    Unix(UnixListener),
}

/// The certificate in use; replaced when the files are read again.
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
    let socket =
        bind_private(path).with_context(|| format!("cannot listen on {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))
        .with_context(|| format!("cannot protect {}", path.display()))?;
    rustix::net::listen(&socket, BACKLOG)
        .with_context(|| format!("cannot listen on {}", path.display()))?;
    UnixListener::from_std(socket.into())
        .with_context(|| format!("cannot listen on {}", path.display()))
}

/// Binds a socket that only the daemon's user can open from the moment its file exists, whatever the umask: Linux gives
/// the file the mode of the socket's inode.
fn bind_private(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    fchmod(&socket, Mode::from_raw_mode(0o600))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
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

/// Connections of each remote address.
#[derive(Debug, Default)]
struct Peers(Mutex<HashMap<IpAddr, usize>>);

impl Peers {
    fn lock(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.0.lock()
    }

    /// Counts one more connection, unless the address has `limit` already.
    fn enter(self: &Arc<Self>, address: IpAddr, limit: usize) -> Option<PeerSlot> {
        let key = peer_key(address);
        let mut counts = self.lock();
        let count = counts.entry(key).or_default();
        if *count >= limit {
            return None;
        }
        *count += 1;
        Some(PeerSlot {
            peers: Arc::clone(self),
            key,
        })
    }
}

/// One connection of an address; counted until it is dropped.
#[derive(Debug)]
struct PeerSlot {
    peers: Arc<Peers>,
    key: IpAddr,
}

impl Drop for PeerSlot {
    fn drop(&mut self) {
        let mut counts = self.peers.lock();
        if let Some(count) = counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
    }
}

/// A place in a listener's pool. A request can clone it to keep the place after an upgrade, when hyper has given the
/// connection away.
#[derive(Debug, Clone)]
pub struct ConnectionSlot {
    _held: Arc<(OwnedSemaphorePermit, Option<PeerSlot>)>,
}

/// Accepts connections and serves the router on them.
#[derive(Debug, Clone)]
pub struct Server {
    router: Router,
    tls: Option<Tls>,
    stop: CancellationToken,
    limits: Limits,
    connections: TaskTracker,
    peers: Arc<Peers>,
}

impl Server {
    /// Does not accept yet.
    pub fn new(router: Router, tls: Option<Tls>, limits: Limits, stop: CancellationToken) -> Self {
        Self {
            router,
            tls,
            stop,
            limits,
            connections: TaskTracker::new(),
            peers: Arc::default(),
        }
    }

    /// Accepts connections until the daemon stops.
    pub async fn accept(self, bound: Bound) {
        let size = match &bound {
            Bound::Tcp(_) => self.limits.tcp,
            Bound::Unix(_) => self.limits.unix,
        };
        let pool = Arc::new(Semaphore::new(size));
        loop {
            let accepted = tokio::select! {
                () = self.stop.cancelled() => return,
                accepted = self.one(&bound, &pool) => accepted,
            };
            if let Err(error) = accepted {
                // Most likely out of descriptors: other connections give theirs back in time.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }

    /// Accepts one connection once the pool has a place for it.
    async fn one(&self, bound: &Bound, pool: &Arc<Semaphore>) -> io::Result<()> {
        let permit = Arc::clone(pool)
            .acquire_owned()
            .await
            .map_err(io::Error::other)?;
        match bound {
            Bound::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                let Some(peer_slot) = self.peers.enter(address.ip(), self.limits.per_peer) else {
                    tracing::debug!(%address, "too many connections of one address");
                    return Ok(());
                };
                let slot = ConnectionSlot {
                    _held: Arc::new((permit, Some(peer_slot))),
                };
                self.tcp(stream, address, slot)?;
            }
            Bound::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let peer = unix_peer(stream.peer_cred().ok().map(|cred| cred.uid()));
                let slot = ConnectionSlot {
                    _held: Arc::new((permit, None)),
                };
                let server = self.clone();
                self.connections
                    .spawn(async move { server.serve(stream, peer, slot).await });
            }
        }
        Ok(())
    }

    fn tcp(&self, stream: TcpStream, address: SocketAddr, slot: ConnectionSlot) -> io::Result<()> {
        stream.set_nodelay(true)?;
        find_vanished(&stream)?;
        let peer = Peer {
            remote: address.to_string(),
            address: Some(address.ip()),
            trusted: None,
        };
        let tls = self.tls.as_ref().map(|tls| Arc::clone(&tls.read()));
        let server = self.clone();
        self.connections.spawn(async move {
            let Some(config) = tls else {
                return server.serve(stream, peer, slot).await;
            };
            let handshake = TlsAcceptor::from(config).accept(stream);
            match tokio::time::timeout(server.limits.handshake, handshake).await {
                Ok(Ok(stream)) => server.serve(stream, peer, slot).await,
                Ok(Err(error)) => tracing::debug!(%error, "no TLS"),
                Err(_) => tracing::debug!("the TLS handshake took too long"),
            }
        });
        Ok(())
    }

    async fn serve<S>(&self, stream: S, peer: Peer, slot: ConnectionSlot)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let activity = Arc::new(Activity::new());
        let service = {
            let (router, activity) = (self.router.clone(), Arc::clone(&activity));
            service_fn(move |request: Request<Incoming>| {
                let mut request = request.map(Body::new);
                request.extensions_mut().insert(peer.clone());
                request.extensions_mut().insert(slot.clone());
                let in_flight = InFlight::new(&activity);
                let router = router.clone();
                async move {
                    let response = router.oneshot(request).await?;
                    Ok::<_, Infallible>(holding(response, in_flight))
                }
            })
        };
        let mut builder = Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.headers)
            .max_buf_size(MAX_HEADERS)
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(PING)
            .keep_alive_timeout(PING)
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(MAX_HEADERS as u32);
        let watched = Watched {
            stream,
            activity: Some(Arc::clone(&activity)),
        };
        let connection = builder.serve_connection_with_upgrades(TokioIo::new(watched), service);
        tokio::pin!(connection);
        tokio::select! {
            _ = connection.as_mut() => return,
            () = activity.overdue(&self.limits) => return,
            () = self.stop.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        tokio::select! {
            _ = connection => {}
            () = activity.overdue(&self.limits) => {}
        }
    }

    /// Waits until every connection has ended.
    pub async fn drained(&self) {
        self.connections.close();
        self.connections.wait().await;
    }
}

/// Lets the kernel end a connection whose peer has vanished.
fn find_vanished(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    let millis = u32::try_from(UNACKNOWLEDGED.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(stream, millis)?;
    Ok(())
}

/// Root and the daemon's own user need no token: both can read the tokens anyway.
fn unix_peer(uid: Option<u32>) -> Peer {
    let own = rustix::process::geteuid().as_raw();
    Peer {
        remote: "unix".to_owned(),
        address: None,
        trusted: uid
            .filter(|uid| *uid == 0 || *uid == own)
            .map(|uid| format!("uid:{uid}")),
    }
}

/// The activity of a connection, for its deadlines. The module comment has the states.
#[derive(Debug)]
struct Activity {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug)]
struct State {
    first_byte: bool,
    served: bool,
    in_flight: usize,
    /// When the state last changed.
    since: Instant,
}

impl Activity {
    fn new() -> Self {
        Self {
            state: Mutex::new(State {
                first_byte: false,
                served: false,
                in_flight: 0,
                since: Instant::now(),
            }),
            changed: Notify::new(),
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        {
            let mut state = self.state.lock();
            change(&mut state);
            state.since = Instant::now();
        }
        self.changed.notify_one();
    }

    /// When the connection is to be closed; none while a request is in flight.
    fn deadline(&self, limits: &Limits) -> Option<Instant> {
        let state = self.state.lock();
        let limit = match (state.first_byte, state.served) {
            (false, _) => limits.first_byte,
            (true, false) => limits.headers,
            (true, true) => limits.idle,
        };
        (state.in_flight == 0).then(|| state.since + limit)
    }

    /// Waits until the connection has passed its deadline.
    async fn overdue(&self, limits: &Limits) {
        loop {
            match self.deadline(limits) {
                None => self.changed.notified().await,
                Some(at) if at <= Instant::now() => return,
                Some(at) => {
                    tokio::select! {
                        () = tokio::time::sleep_until(at) => {}
                        () = self.changed.notified() => {}
                    }
                }
            }
        }
    }
}

/// A request in flight: from its headers to the end of the response's body.
struct InFlight(Arc<Activity>);

impl InFlight {
    fn new(activity: &Arc<Activity>) -> Self {
        activity.change(|state| {
            state.in_flight += 1;
            state.served = true;
        });
        Self(Arc::clone(activity))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.change(|state| state.in_flight -= 1);
    }
}

/// A stream that reports its first byte.
struct Watched<S> {
    stream: S,
    /// None once the first byte was reported.
    activity: Option<Arc<Activity>>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before
            && let Some(activity) = self.activity.take()
        {
            activity.change(|state| state.first_byte = true);
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_socket_file_is_private_before_it_is_opened_to_the_group() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        // Tests run in a process each.
        rustix::process::umask(Mode::empty());
        let _socket = bind_private(&path).unwrap();
        let mode = std::fs::symlink_metadata(&path).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn connections_leave_descriptors_for_others() {
        let limits = Limits::default();
        assert_eq!(limits.within(1 << 20, 2), limits);
        let small = limits.within(1024, 2);
        assert_eq!((small.tcp, small.per_peer), (256, 128));
        assert_eq!(limits.within(0, 0).tcp, 1);
    }

    #[test]
    fn an_address_has_a_share_and_gives_it_back() {
        let peers = Arc::new(Peers::default());
        let enter = |text: &str| peers.enter(text.parse().unwrap(), 2);
        let first = enter("10.0.0.1").unwrap();
        let _second = enter("::ffff:10.0.0.1").unwrap();
        assert!(enter("10.0.0.1").is_none());
        drop(first);
        assert!(enter("10.0.0.1").is_some());
        let _net = (enter("fd00::1").unwrap(), enter("fd00::2").unwrap());
        assert!(enter("fd00::3").is_none());
        assert!(enter("fd00:0:0:1::3").is_some());
        assert_eq!(peers.lock().len(), 2);
    }
}
