//! Snapshots on their way between hosts: packing into an artifact, and unpacking one.
//!
//! `forkd-hub` knows the format and does the work; the modules here connect it to the store. [`portable`] translates between
//! the manifest of the store and the configuration of an artifact.

mod pack;
mod portable;
mod unpack;

pub use pack::{PackRequest, PackedSnapshot, base, pack};
pub use unpack::{UnpackRequest, check, unpack};
