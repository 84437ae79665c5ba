//! Encryption of stored secrets: AES-256-GCM with a key in a file of its own.
//!
//! The state database holds sealed values only. A copy of the database without the key file opens none of them. The name
//! and owner of a secret are authenticated with its value, so a row cannot take the place of another one.

use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use thiserror::Error;

const KEY: usize = 32;

/// Why a secret cannot be sealed or opened.
#[derive(Debug, Error)]
pub enum SealError {
    #[error("cannot {action} the key of secrets {}", path.display())]
    KeyFile {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the key of secrets {} has {found} bytes, not {KEY}", path.display())]
    KeyLength { path: PathBuf, found: usize },
    #[error("a stored secret does not open with the key of this host")]
    Broken,
    #[error("cannot seal a secret")]
    Failed,
}

/// Seals and opens. The key file is made at the first use.
#[derive(Debug)]
pub struct Seal {
    path: PathBuf,
    key: OnceLock<SealKey>,
}

struct SealKey {
    bytes: [u8; KEY],
}

impl std::fmt::Debug for SealKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SealKey(hidden)")
    }
}

impl Seal {
    pub fn new(path: PathBuf) -> Self {
        let key = OnceLock::new();
        Self { path, key }
    }

    fn key(&self) -> Result<&SealKey, SealError> {
        if let Some(key) = self.key.get() {
            return Ok(key);
        }
        let bytes = read_or_make(&self.path)?;
        Ok(self.key.get_or_init(|| SealKey { bytes }))
    }

    fn cipher(&self) -> Result<RandomizedNonceKey, SealError> {
        RandomizedNonceKey::new(&AES_256_GCM, &self.key()?.bytes).map_err(|_| SealError::Failed)
    }

    /// Encrypts `plain`, which opens only under the same label.
    pub fn seal(&self, label: &str, plain: &[u8]) -> Result<Vec<u8>, SealError> {
        let mut body = plain.to_vec();
        let nonce = self
            .cipher()?
            .seal_in_place_append_tag(Aad::from(label.as_bytes()), &mut body)
            .map_err(|_| SealError::Failed)?;
        Ok([nonce.as_ref(), body.as_slice()].concat())
    }

    pub fn open(&self, label: &str, sealed: &[u8]) -> Result<Vec<u8>, SealError> {
        let (nonce, body) = sealed
            .split_at_checked(NONCE_LEN)
            .ok_or(SealError::Broken)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| SealError::Broken)?;
        let mut body = body.to_vec();
        let plain = self
            .cipher()?
            .open_in_place(nonce, Aad::from(label.as_bytes()), &mut body)
            .map_err(|_| SealError::Broken)?;
        Ok(plain.to_vec())
    }

    /// A text that stands for a secret in a guest: always the same for one label, and no hint of the value.
    pub fn placeholder(&self, label: &str) -> Result<String, SealError> {
        let key = blake3::derive_key("forkd 2026 placeholders of secrets", &self.key()?.bytes);
        let hash = blake3::keyed_hash(&key, label.as_bytes());
        let digits = hash.to_hex();
        let digits = digits.get(..32).unwrap_or_default();
        Ok(format!("{}{digits}", forkd_net_proto::broker::PLACEHOLDER))
    }
}

fn read_or_make(path: &Path) -> Result<[u8; KEY], SealError> {
    let failed = |action, source| SealError::KeyFile {
        action,
        path: path.to_owned(),
        source,
    };
    let new: [u8; KEY] = rand::random();
    let mut options = std::fs::OpenOptions::new();
    match options.write(true).create_new(true).mode(0o600).open(path) {
        Ok(mut file) => {
            file.write_all(&new)
                .and_then(|()| file.sync_all())
                .map_err(|source| failed("write", source))?;
            return Ok(new);
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(source) => return Err(failed("make", source)),
    }
    let mut bytes = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(KEY as u64 + 1).read_to_end(&mut bytes))
        .map_err(|source| failed("read", source))?;
    let found = bytes.len();
    let path = path.to_owned();
    <[u8; KEY]>::try_from(bytes).map_err(|_| SealError::KeyLength { path, found })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_value_opens_under_its_label_and_key_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let seal = Seal::new(path.clone());
        let sealed = seal.seal("ann/key", b"sk-very-secret").unwrap();
        assert!(!sealed.windows(4).any(|part| part == b"very"));
        assert_ne!(sealed, seal.seal("ann/key", b"sk-very-secret").unwrap());
        // A later daemon reads the same file.
        let later = Seal::new(path.clone());
        assert_eq!(later.open("ann/key", &sealed).unwrap(), b"sk-very-secret");
        assert_eq!(
            later.placeholder("a").unwrap(),
            seal.placeholder("a").unwrap()
        );
        assert_ne!(
            later.placeholder("a").unwrap(),
            seal.placeholder("b").unwrap()
        );
        assert!(later.open("bob/key", &sealed).is_err());
        let mut broken = sealed.clone();
        broken[NONCE_LEN] ^= 1;
        assert!(later.open("ann/key", &broken).is_err());
        assert!(later.open("ann/key", &sealed[..5]).is_err());
        let other = Seal::new(folder.path().join("other"));
        assert!(other.open("ann/key", &sealed).is_err());
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(!format!("{seal:?}").contains(&format!("{:?}", seal.key().unwrap().bytes)));
        std::fs::write(&path, b"short").unwrap();
        assert!(matches!(
            Seal::new(path).seal("a", b"b"),
            Err(SealError::KeyLength { .. })
        ));
    }
}
