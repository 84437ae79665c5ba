//! QEMU as a child process: find it, build its command line, start it.
//!
//! [`Qemu`] is a program that is new enough, [`Launch`] the parameters of one start, and [`running`] the
//! process of a machine.

mod find;
mod launch;

pub use find::Qemu;
pub(crate) use launch::{AGENT_PORT, API_PORT, Launch, launch, running};
