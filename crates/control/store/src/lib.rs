//! Snapshots and images on disk.
//!
//! ```text
//!   <data>/store.json               format of this directory
//!   <data>/blobs/<digest>           content, named by its digest: memory, state, disk layers, base images
//!   <data>/snapshots/<tag>/manifest.json    what a tag is made of; blobs by digest
//!   <data>/sandboxes/<id>/          writable disk layers and the console of a live sandbox
//!   <data>/images/<name>/           images that parents are built from
//!   <data>/staging/                 what is being written; emptied at every start
//! ```
//!
//! Invariants:
//!
//! - No process outside of the daemon can write the inode of a blob ([`Store::ingest`]).
//! - A blob is complete and durable before a manifest names it. A manifest appears by one rename. After a crash, a tag is
//!   complete or absent.
//! - A blob is removed when no manifest names it and no [`Lease`] holds it.
//!
//! [`Store`] is the only entry point; its locks and their order are described in `store.rs`.

mod blobs;
mod collect;
mod digest;
mod draft;
mod durable;
mod error;
mod format;
mod fsck;
mod hashed;
mod images;
mod info;
mod ingest;
mod layout;
mod lease;
mod lineage;
mod manifest;
mod merge;
mod sparse;
mod staging;
mod store;
mod tags;
mod volatile;

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod ingest_tests;

pub use digest::page_digest;
pub use error::StoreError;
pub use fsck::FsckFindings;
pub use images::Image;
pub use info::{Detail, Usage};
pub use ingest::{Ingested, volatile_file};
pub use layout::Layout;
pub use lease::Lease;
pub use manifest::{
    BlobRef, Cpu, DiskManifest, MAX_CHAIN, Manifest, ManifestError, MemoryManifest, Origin, Parent,
    SCHEMA, Source, Versions, VolumeClone,
};
pub use merge::{MergeError, merge_layers};
pub use sparse::{Sizes, copy_part, sizes};
pub use staging::Staging;
pub use store::Store;
pub use tags::{Deletion, Entry, Published};
