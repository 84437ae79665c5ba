//! State that all requests of the plane share.
//!
//! Nothing here is the only copy of anything: the key is in a file of the data directory, and the rest is a cache or ends
//! with the daemon (watchers that are polled). Entries of sandboxes that are gone are dropped when others are added.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, bail};
use forkd_sandboxes::app::App;
use forkd_types::SandboxId;

use super::access::{self, Operation, TokenKind};
use super::config::E2bConfig;
use super::control::metrics::Samples;
use super::envd::users::Users;
use super::envd::watchers::Watchers;
use super::interpreter::Contexts;

/// Labels by which a sandbox keeps settings of this plane. They survive a pause.
pub mod labels {
    /// The template that the client named.
    pub const TEMPLATE: &str = "e2b.template";
    /// Milliseconds since the epoch at which the sandbox was started: lists are in this order.
    pub const STARTED: &str = "e2b.started";
    /// A request to a paused sandbox resumes it.
    pub const AUTO_RESUME: &str = "e2b.auto-resume";
    /// Ports of the guest need a token.
    pub const PRIVATE_TRAFFIC: &str = "e2b.private-traffic";
}

/// The first line of the key file.
const KEY_HEADER: &str = "forkd e2b key 1";

/// State that all requests of the plane share.
pub struct E2b {
    pub app: Arc<App>,
    pub config: E2bConfig,
    key: [u8; 32],
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
    /// Reads the key of access tokens, and makes one at the first start.
    pub fn open(app: Arc<App>, config: E2bConfig) -> anyhow::Result<Self> {
        let path = app.config.data_dir.join("e2b.key");
        let key = read_key(&path)
            .with_context(|| format!("the key of E2B access tokens {}", path.display()))?;
        Ok(Self {
            app,
            config,
            key,
            per_sandbox: Mutex::default(),
        })
    }

    /// The token of a sandbox.
    pub fn token(&self, kind: TokenKind, id: &SandboxId) -> String {
        access::token(&self.key, kind, id)
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
        self.per_sandbox
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
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

fn read_key(path: &Path) -> anyhow::Result<[u8; 32]> {
    let mut text = String::new();
    match std::fs::File::open(path) {
        Ok(file) => {
            file.take(1024).read_to_string(&mut text)?;
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let key = hex::encode(rand::random::<[u8; 32]>());
            text = format!("{KEY_HEADER}\n{key}\n");
            let draft = path.with_extension("key.new");
            let _ = std::fs::remove_file(&draft);
            let mut file = std::fs::OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&draft)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            std::fs::rename(&draft, path)?;
        }
        Err(error) => return Err(error.into()),
    }
    let Some(digits) = text.strip_prefix(KEY_HEADER) else {
        bail!("is not a key of this version");
    };
    let key = hex::decode(digits.trim()).context("is not hexadecimal")?;
    key.try_into()
        .map_err(|_| anyhow::anyhow!("has a wrong length"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_stays_the_same_and_an_odd_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("e2b.key");
        let key = read_key(&path).unwrap();
        assert_eq!(read_key(&path).unwrap(), key);
        for text in ["", "forkd e2b key 2\n00\n", "forkd e2b key 1\n00\n"] {
            std::fs::write(&path, text).unwrap();
            assert!(read_key(&path).is_err(), "{text:?}");
        }
    }
}
