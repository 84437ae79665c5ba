//! Root file systems: sources, content, and the disk they become.
//!
//! A [`RootSource`] fetches files into a [`tree::Tree`] in memory; [`ext4`] writes the tree to a disk.

pub mod ext4;
pub mod layer;
pub mod oci;
pub mod tar;
pub mod tree;

use std::collections::BTreeMap;
use std::path::Path;

pub use forkd_formats::image::{ImageSource, PackageRecord, RunDefaults};
use thiserror::Error;

use crate::debian::bootstrap::BootstrapError;
use crate::progress::Progress;
use tree::Tree;

/// A root and what is known of it.
#[derive(Debug)]
pub struct Root {
    pub tree: Tree,
    /// The packages of the files, sorted by name.
    pub packages: Vec<PackageRecord>,
    /// Where they are from.
    pub source: ImageSource,
    /// The release of the kernel whose modules are among them.
    pub kernel: Option<String>,
    /// The environment that its source brings.
    pub env: BTreeMap<String, String>,
    /// How its programs expect to run.
    pub run: RunDefaults,
}

/// Why a source gave no root.
#[derive(Debug, Error)]
pub enum RootError {
    #[error("Debian's packages could not be made into a root")]
    Debian(#[from] BootstrapError),
    #[error("the container image could not be made into a root")]
    Oci(#[from] Box<oci::OciRootError>),
}

/// A source of roots: Debian's packages, or the layers of a container image. Each source reads into a [`Tree`], and
/// everything after that is the same.
pub trait RootSource {
    /// Everything that affects the result.
    fn fingerprint(&self) -> Vec<u8>;

    /// Makes the root. The tree refers to files in `work`, so the folder must exist as long as the tree.
    fn fetch(&self, work: &Path, progress: &Progress) -> Result<Root, RootError>;
}
