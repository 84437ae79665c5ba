//! QEMU: finding one that works, its command line, starting it.

mod find;
mod launch;

pub use find::Qemu;
pub(crate) use launch::{AGENT_PORT, API_PORT, Launch, launch, running};
