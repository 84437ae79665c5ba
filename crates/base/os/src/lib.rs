//! Small helpers over Linux system calls that both the daemon and the VMM need.
//!
//! `control` never links `host`, and `contract` names no operating system, so what the two share beyond words stands
//! here: [`sparse`] (files with holes), [`beneath`] (opening a path that must stay below a directory),
//! [`seqpacket`] (listening sockets) and [`raise_file_limit`]. Nothing in this crate knows about sandboxes or snapshots.

pub mod beneath;
mod limits;
pub mod seqpacket;
pub mod sparse;

pub use limits::raise_file_limit;
