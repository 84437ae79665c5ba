//! State that all requests of the plane share.
//!
//! Nothing here is the only copy of anything: it is a cache or ends with the daemon (watchers that are polled). Entries of sandboxes that are gone are dropped when others are added.

use std::collections::HashMap;
use std::sync::Arc;

use forkd_sandboxes::app::App;
use forkd_types::SandboxId;
use parking_lot::{Mutex, MutexGuard};

use super::access::{self, Operation};
use super::config::E2bConfig;
use super::control::metrics::Samples;
use super::envd::users::Users;
use super::envd::watchers::Watchers;
use super::interpreter::Contexts;
use crate::ports::{Ports, TokenKind};

/// Labels by which a sandbox keeps settings of this plane. They survive a pause.
pub mod labels {
    /// The template that the client named.
    pub const TEMPLATE: &str = "e2b.template";
    /// Milliseconds since the epoch at which the sandbox was started: lists are in this order.
    pub const STARTED: &str = "e2b.started";
    /// A request to a paused sandbox resumes it.
    pub const AUTO_RESUME: &str = "e2b.auto-resume";
}

/// State that all requests of the plane share.
pub struct E2b {
    pub app: Arc<App>,
    pub config: E2bConfig,
    pub ports: Arc<Ports>,
    per_sandbox: Mutex<HashMap<SandboxId, Arc<PerSandbox>>>,
}

/// State of the plane for one sandbox.
#[derive(Default)]
pub struct PerSandbox {
    pub users: Users,
    pub watchers: Watchers,
    pub samples: Samples,
    pub contexts: Contexts,
}

impl E2b {
    /// The plane without any request.
    pub fn new(app: Arc<App>, config: E2bConfig, ports: Arc<Ports>) -> Self {
        Self {
            app,
            config,
            ports,
            per_sandbox: Mutex::default(),
        }
    }

    /// The token of a sandbox.
    pub fn token(&self, kind: TokenKind, id: &SandboxId) -> String {
        self.ports.key.token(kind, id)
    }

    /// The operation that a query is signed for with the token of a sandbox, and whether its time is over.
    pub fn signs(
        &self,
        id: &SandboxId,
        query: &[(String, String)],
        given: &str,
    ) -> Option<(Operation, bool)> {
        access::signed(&self.token(TokenKind::Envd, id), query, given)
    }

    fn map(&self) -> MutexGuard<'_, HashMap<SandboxId, Arc<PerSandbox>>> {
        self.per_sandbox.lock()
    }

    /// The state of the plane for a live sandbox.
    pub fn of(&self, id: &SandboxId) -> Arc<PerSandbox> {
        let mut map = self.map();
        if let Some(found) = map.get(id) {
            return Arc::clone(found);
        }
        map.retain(|id, _| self.app.sandboxes.get(id).is_ok());
        Arc::clone(map.entry(id.clone()).or_default())
    }
}
