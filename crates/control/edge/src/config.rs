//! The checked settings of the front door: listeners, TLS, tokens, audit log and limits.

use std::path::PathBuf;

pub use crate::audit::Limits as AuditLimits;
pub use crate::gate::RequestLimits;
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
    /// Tokens of administrators. Without any token, every client that reaches the socket may do everything.
    pub token_file: Option<PathBuf>,
    /// TLS for TCP.
    pub tls: Option<TlsFiles>,
    /// Limits on connections.
    pub connections: ConnectionLimits,
    /// Limits on requests.
    pub requests: RequestLimits,
    /// Host names besides those of the loopback under which clients without a token may address the daemon.
    pub allowed_hosts: Vec<String>,
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
            requests: RequestLimits {
                total: 16,
                per_owner: 16,
                per_second: 0,
            },
            allowed_hosts: Vec::new(),
        }
    }
}
