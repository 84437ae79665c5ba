//! Container images of strangers.
//!
//! [`source`] parses where an image lies, [`open`] finds its manifest and configuration there, and [`layer`] turns its
//! layers into plain tar archives. Manifest and configuration are checked against the digests that name
//! them, and each layer against the digest that the configuration promises for its plain bytes. Every size has a limit
//! ([`limits`]).

pub mod archive;
pub mod auth;
pub mod config;
pub mod digest;
pub mod engine;
pub mod http;
pub mod layer;
pub mod layout;
pub mod limits;
pub mod manifest;
pub mod name;
pub mod part;
pub mod registries;
pub mod registry;
pub mod source;
pub mod stream;

mod error;
mod image;

pub use error::OciError;
pub use image::{Image, Layer, Means, open};
