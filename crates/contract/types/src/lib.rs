//! The words every part of forkd shares.
//!
//! Each type here is parsed once, at the border, and is valid from then on: a function that takes a
//! [`Tag`] never asks again whether the tag is safe to use as a file name.

mod digest;
mod dirs;
mod engine;
mod id;
pub mod layer;
mod size;
mod tag;

pub use digest::{Digest, InvalidDigest};
pub use dirs::data_dir;
pub use engine::{Engine, InvalidEngine};
pub use id::{InvalidSandboxId, SandboxId};
pub use size::{InvalidSize, MiB, PAGE_SIZE};
pub use tag::{InvalidTag, Tag};
