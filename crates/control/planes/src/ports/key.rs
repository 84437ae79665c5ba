//! Access tokens of sandboxes.
//!
//! A token is derived from a key of the daemon and the ID of the sandbox, so it needs no place on disk and stays the same
//! over a pause and a restart.

use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, bail};
use forkd_types::SandboxId;
use subtle::ConstantTimeEq;

/// The first line of the key file.
const KEY_HEADER: &str = "forkd e2b key 1";

/// The use of a token. The two kinds differ, so one cannot be used as the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// Processes and files.
    Envd,
    /// Ports of the guest, the interpreter included.
    Traffic,
}

/// The key of the daemon's access tokens.
#[derive(Clone)]
pub struct AccessKey([u8; 32]);

impl AccessKey {
    /// Reads the key, and makes one at the first start.
    pub fn open(data_dir: &Path) -> anyhow::Result<Self> {
        let path = data_dir.join("e2b.key");
        read_key(&path)
            .map(Self)
            .with_context(|| format!("the key of access tokens {}", path.display()))
    }

    /// The token of a sandbox.
    pub fn token(&self, kind: TokenKind, id: &SandboxId) -> String {
        let kind = match kind {
            TokenKind::Envd => "envd",
            TokenKind::Traffic => "traffic",
        };
        let text = format!("forkd e2b {kind} {id}");
        blake3::keyed_hash(&self.0, text.as_bytes())
            .to_hex()
            .to_string()
    }

    /// Whether a text is the token of a sandbox, in constant time.
    pub fn is_token(&self, kind: TokenKind, id: &SandboxId, given: &str) -> bool {
        bool::from(given.as_bytes().ct_eq(self.token(kind, id).as_bytes()))
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

    #[test]
    fn tokens_differ_by_kind_and_sandbox() {
        let (a, b) = (SandboxId::from_parts(1, 1), SandboxId::from_parts(1, 2));
        let key = AccessKey([7; 32]);
        let tokens = [
            key.token(TokenKind::Envd, &a),
            key.token(TokenKind::Envd, &b),
            key.token(TokenKind::Traffic, &a),
            AccessKey([8; 32]).token(TokenKind::Envd, &a),
        ];
        let different: std::collections::BTreeSet<_> = tokens.iter().collect();
        assert_eq!(different.len(), tokens.len());
        assert!(key.is_token(TokenKind::Traffic, &a, &tokens[2]));
        assert!(!key.is_token(TokenKind::Traffic, &a, &tokens[0]));
    }
}
