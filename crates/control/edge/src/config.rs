//! How the front door is set up, checked.

use std::net::SocketAddr;
use std::path::PathBuf;

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenAddr {
    /// TCP.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

/// A certificate and its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// PEM chain.
    pub cert: PathBuf,
    /// PEM key.
    pub key: PathBuf,
}

/// How the front door is set up.
#[derive(Debug, Clone)]
pub struct EdgeConfig {
    /// Where to listen.
    pub listen: Vec<ListenAddr>,
    /// The audit log; none if empty.
    pub audit_log: Option<PathBuf>,
    /// Tokens; anybody who reaches the socket may do everything if none.
    pub token_file: Option<PathBuf>,
    /// TLS for TCP.
    pub tls: Option<TlsFiles>,
    /// Requests that may be under way at once.
    pub max_requests: usize,
    /// Requests one actor may make in a second; 0 is no limit.
    pub requests_per_second: u32,
}

impl EdgeConfig {
    /// A front door without listeners, tokens, TLS and audit log: what tests begin with.
    pub fn closed() -> Self {
        Self {
            listen: Vec::new(),
            audit_log: None,
            token_file: None,
            tls: None,
            max_requests: 16,
            requests_per_second: 0,
        }
    }
}
