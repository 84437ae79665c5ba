//! Errors of the store.

use std::path::PathBuf;

use forkd_types::{Digest, PathError, Tag};
use thiserror::Error;

use crate::manifest::ManifestError;

/// Why an operation on the store failed.
#[derive(Debug, Error)]
pub enum StoreError {
    /// A file or directory could not be used.
    #[error(transparent)]
    Path(#[from] PathError),
    /// Another process uses the directory.
    #[error("{} is in use by another daemon", path.display())]
    InUse { path: PathBuf },
    /// The directory was written by another version.
    #[error(
        "{} has store format {found}, this program reads {known}: run the forkd that wrote it, or give another --data-dir",
        path.display()
    )]
    Format {
        path: PathBuf,
        found: u32,
        /// The newest format known here.
        known: u32,
    },
    /// There is no such tag.
    #[error("there is no snapshot {tag}")]
    NotFound { tag: Tag },
    /// The tag is taken.
    #[error("there is already a snapshot {tag}")]
    Exists { tag: Tag },
    /// The manifest of a tag cannot be used.
    #[error("the manifest of {tag} cannot be used")]
    Manifest {
        tag: Tag,
        #[source]
        source: ManifestError,
    },
    /// A file that a manifest names is missing or has another size.
    #[error("snapshot {tag} needs {digest}, {problem}")]
    Blob {
        tag: Tag,
        digest: Digest,
        problem: &'static str,
    },
    /// The content of a blob has changed on disk.
    #[error("the content of {digest} does not match its digest")]
    Damaged { digest: Digest },
    /// Other tags build on this one.
    #[error("{} build on {tag}", list(dependents))]
    HasDependents { tag: Tag, dependents: Vec<Tag> },
    /// The chain of parents is longer than any may be.
    #[error("{tag} would be the {depth}th link of its chain, {limit} is the limit")]
    ChainTooLong {
        tag: Tag,
        /// How deep it would be.
        depth: usize,
        /// How deep a chain may be.
        limit: usize,
    },
    /// Snapshots take as much of the disk as they may.
    #[error("snapshots take {used} bytes on disk, {limit} is the limit")]
    Limit {
        /// Bytes on disk of all blobs, those of the new snapshot included.
        used: u64,
        limit: u64,
    },
    /// There is no such image.
    #[error("there is no image {name:?}")]
    NoImage { name: String },
}

fn list(tags: &[Tag]) -> String {
    let names: Vec<&str> = tags.iter().map(Tag::as_str).collect();
    names.join(", ")
}

impl StoreError {
    /// The disk is full.
    pub fn is_no_space(&self) -> bool {
        matches!(self, Self::Path(error) if error.is_no_space())
    }
}
