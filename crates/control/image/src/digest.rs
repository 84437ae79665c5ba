//! BLAKE3 digests of files and bytes.
//!
//! Holes of a sparse file are hashed as zeros, so that a copy without holes has the same digest.

use std::io;
use std::path::Path;

pub use forkd_formats::image::FileDigest;
use forkd_types::Digest;

pub fn of_bytes(bytes: &[u8]) -> Digest {
    Digest(*blake3::hash(bytes).as_bytes())
}

pub fn of_file(path: &Path) -> io::Result<FileDigest> {
    let size = std::fs::metadata(path)?.len();
    let mut hasher = blake3::Hasher::new();
    hasher.update_mmap_rayon(path)?;
    Ok(FileDigest {
        size,
        digest: Digest(*hasher.finalize().as_bytes()),
    })
}
