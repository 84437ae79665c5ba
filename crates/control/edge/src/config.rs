//! How the front door is set up, checked.

use std::path::PathBuf;

pub use crate::audit::Limits as AuditLimits;
pub use crate::listen::{Limits as ConnectionLimits, ListenAddr, TlsFiles};

/// How the front door is set up.
#[derive(Debug, Clone)]
pub struct EdgeConfig {
    /// Where to listen.
    pub listen: Vec<ListenAddr>,
    /// The audit log; none if empty.
    pub audit_log: Option<PathBuf>,
    /// Limits on the files of the audit log.
    pub audit_limits: AuditLimits,
    /// Tokens; anybody who reaches the socket may do everything if none.
    pub token_file: Option<PathBuf>,
    /// TLS for TCP.
    pub tls: Option<TlsFiles>,
    /// Limits on connections.
    pub connections: ConnectionLimits,
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
            audit_limits: AuditLimits::default(),
            token_file: None,
            tls: None,
            connections: ConnectionLimits::default(),
            max_requests: 16,
            requests_per_second: 0,
        }
    }
}
