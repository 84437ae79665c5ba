//! Drives one VMM process, for tests and benchmarks below the daemon.
//!
//! [`Client`] starts `forkd-vmm` and speaks its control protocol, one command at a time. [`tiny`] has guest
//! programs of a few bytes that need neither a kernel nor devices. Nothing here uses an async runtime.

mod client;
pub mod tiny;

pub use client::{Attach, Client, ClientError};
