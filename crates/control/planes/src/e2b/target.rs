//! The sandbox of a data request, and the extractor that yields it.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use forkd_sandboxes::clock;
use forkd_sandboxes::ops::pause;
use forkd_sandboxes::sandbox::SandboxHandle;
use forkd_types::SandboxId;

use super::access;
use super::error::Refusal;
use super::state::{E2b, labels};

/// Seconds that a sandbox lives after a request has resumed it.
const RESUMED_SECS: u64 = 300;

/// The sandbox and the port that a request names.
#[derive(Debug, Clone)]
pub struct Target {
    /// None if the text is no sandbox ID.
    pub id: Option<SandboxId>,
    /// The ID as it was sent.
    pub text: String,
    pub port: u16,
}

impl Target {
    pub fn new(text: &str, port: u16) -> Self {
        Self {
            id: text.parse().ok(),
            text: text.chars().take(80).collect(),
            port,
        }
    }

    pub fn of(id: SandboxId, port: u16) -> Self {
        Self {
            text: id.to_string(),
            id: Some(id),
            port,
        }
    }
}

/// A running sandbox that the request may use. A paused one is resumed first if it is set up so.
#[derive(Debug)]
pub struct Reached {
    pub sandbox: Arc<SandboxHandle>,
    pub port: u16,
}

impl FromRequestParts<Arc<E2b>> for Reached {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, e2b: &Arc<E2b>) -> Result<Self, Refusal> {
        let target = parts.extensions.get::<Target>().cloned();
        let target = target.ok_or_else(|| Refusal::not_running("unknown"))?;
        let gone = || Refusal::not_running(&target.text);
        let id = target.id.clone().ok_or_else(gone)?;
        let running = |sandbox: &Arc<SandboxHandle>| sandbox.phase().answers();
        let port = target.port;
        // The gate has checked the token for a live sandbox.
        if let Ok(sandbox) = e2b.app.sandboxes.get(&id)
            && running(&sandbox)
        {
            return Ok(Self { sandbox, port });
        }
        let paused = pause::find(&e2b.app, &id).await.ok().flatten();
        let kept = paused
            .and_then(|record| record.of_sandbox)
            .ok_or_else(gone)?;
        if !kept.labels.contains_key(labels::AUTO_RESUME) {
            return Err(gone());
        }
        let access = kept.ports.access(port);
        let sent = access::Credentials {
            method: &parts.method,
            uri: &parts.uri,
            headers: &parts.headers,
        };
        access::check(e2b, &id, port, access, sent)?;
        let expires = clock::unix().saturating_add(RESUMED_SECS);
        let sandbox = pause::resume(&e2b.app, &id, Some(expires)).await?;
        Ok(Self { sandbox, port })
    }
}
