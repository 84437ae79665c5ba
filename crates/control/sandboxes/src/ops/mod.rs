//! Operations on sandboxes and snapshots, each in a file of its own.
//!
//! An operation takes a checked request (a type of this crate), asks [`crate::limits`] before it takes the first resource, and
//! hands everything that concerns one sandbox to that sandbox's owner ([`crate::sandbox`]).

pub mod branch;
pub mod build;
pub mod compact;
pub mod fork;
pub mod hub;
pub mod images;
pub mod network;
pub mod pause;
pub mod secrets;
pub mod snapshots;
pub mod spawn;
pub mod workspaces;
pub mod writing;
