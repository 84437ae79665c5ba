//! Root file systems: where they come from, what they hold, and how they become a disk.

pub mod ext4;
pub mod tar;
pub mod tree;

use std::path::Path;

pub use forkd_formats::image::{ImageSource, PackageRecord};
use thiserror::Error;

use crate::debian::bootstrap::BootstrapError;
use crate::progress::Progress;
use tree::Tree;

/// A root and what is known of it.
#[derive(Debug)]
pub struct Root {
    /// The files.
    pub tree: Tree,
    /// The packages they are from, sorted by name.
    pub packages: Vec<PackageRecord>,
    /// The origin of the files.
    pub source: ImageSource,
    /// The release of the kernel whose modules are among them.
    pub kernel: Option<String>,
}

/// Why a source gave no root.
#[derive(Debug, Error)]
pub enum RootError {
    /// Debian's packages could not be put together.
    #[error("Debian's packages could not be made into a root")]
    Debian(#[from] BootstrapError),
}

/// A source of root file systems. Debian's packages are one; layers of an OCI image would be another: each reads into a
/// [`Tree`], and every later step is the same.
pub trait RootSource {
    /// Everything that has a say in what comes out.
    fn fingerprint(&self) -> Vec<u8>;

    /// Makes the root. `work` is a folder for files that the tree refers to; it lives as long as
    /// the tree is needed.
    fn fetch(&self, work: &Path, progress: &Progress) -> Result<Root, RootError>;
}
