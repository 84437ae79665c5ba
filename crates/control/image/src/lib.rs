//! Builds guest kernels, initramfs files and root images.
//!
//! All content comes from packages of the host's own Debian mirror, with apt's verification. Results are
//! plain files: nothing is installed on the host, and nothing is mounted. Finished content lies in the user's
//! cache under content keys ([`cache`]).

pub mod cache;
pub mod confine;
pub mod debian;
pub mod digest;
pub mod error;
pub mod export;
pub mod image;
pub mod initramfs;
pub mod kernel;
pub mod lock;
pub mod machine;
pub mod progress;
pub mod recipe;
pub mod root;
pub mod tools;
