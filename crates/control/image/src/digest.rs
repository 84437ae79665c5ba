//! Digests of files.

use std::io;
use std::path::Path;

use forkd_types::Digest;
use serde::{Deserialize, Serialize};

/// The size and digest of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileDigest {
    /// Its length in bytes.
    pub size: u64,
    /// The BLAKE3 digest of its content.
    pub digest: Digest,
}

/// Digest of bytes in memory.
pub fn of_bytes(bytes: &[u8]) -> Digest {
    Digest(*blake3::hash(bytes).as_bytes())
}

/// Size and digest of a file. Holes count as zeros.
pub fn of_file(path: &Path) -> io::Result<FileDigest> {
    let size = std::fs::metadata(path)?.len();
    let mut hasher = blake3::Hasher::new();
    hasher.update_mmap_rayon(path)?;
    Ok(FileDigest {
        size,
        digest: Digest(*hasher.finalize().as_bytes()),
    })
}
