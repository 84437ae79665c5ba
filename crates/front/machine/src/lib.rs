//! `forkd machine`: a managed Debian VM under QEMU in which KVM works.
//!
//! It gives a KVM host to people who have none: a cloud runner without nested virtualisation, a
//! laptop. Hardware acceleration where the host has it, software emulation where it must.

pub mod dirs;
mod name;

pub use name::{InvalidMachineName, MachineName};
