//! Frozen machines as OCI artifacts.
//!
//! ```text
//!   blobs of a snapshot ──[pack]──► pages without duplicates ──► frames (16 pages, zstd) ──► packs (at most 64 MiB)
//!                                        └──► index: which page of which blob is which page of which pack
//!   manifest ──sha256──► config, index, hashes, packs        index ──BLAKE3──► frames        config ──b3──► blobs
//! ```
//!
//! | module | content |
//! |---|---|
//! | [`manifest`], [`config`], [`index`] | the documents of an artifact, parsed as untrusted input |
//! | [`documents`] | all documents of one artifact, checked against one another |
//! | [`pack`] | writes packs from files, and leaves out pages that a base has already |
//! | [`archive`] | the artifact as one tar stream with the documents first |
//! | [`unpack`] | turns such a stream into files, checking every digest |
//! | [`known`] | pages that are on this host already |
//! | [`sign`] | SSH signatures over the digest of the manifest, and who is trusted |
//! | [`compat`] | whether a host can run the memory of an artifact |
//! | [`secrets`] | patterns of keys and tokens in pages |
//! | [`layout`] | artifacts in folders and archive files |
//! | [`remote`] | artifacts in registries, on web servers and in object stores |
//! | [`published`] | packs of forkd 0.5 |
//!
//! Only [`remote`] does networking, and the daemon does not use it. The crate knows no store: callers give it files and
//! get files back. Invariant: nothing that
//! [`unpack`] returns differs from the digest that the manifest leads to.

pub mod archive;
pub mod compat;
pub mod config;
pub mod documents;
pub mod index;
pub mod known;
pub mod layout;
pub mod limits;
pub mod manifest;
pub mod pack;
pub mod pages;
pub mod published;
pub mod remote;
pub mod secrets;
pub mod sign;
pub mod unpack;

mod error;
mod writer;

pub use error::{HubError, Kind};
