//! Safe wrappers over the system calls that the host programs need.
//!
//! rustix is used wherever it has a safe function. This crate has the rest: process forks, signals, the page
//! map, write tracking, inherited descriptors, tap devices, packets with descriptors. Every `unsafe` block
//! states why it is sound.

pub mod filter_probe;
mod fork;
mod heap;
mod inherit;
pub mod jail;
mod pagemap;
mod signal;
mod tap;
pub mod testing;
mod track;

pub use fork::{ChildWriter, ForkError};
pub use forkd_channel::{Channel, ChannelError, Received};
pub use heap::use_one_heap;
pub use inherit::inherited_fd;
pub use pagemap::{PageRange, Pagemap, PagemapError, open_pagemap};
pub use signal::{
    FORBIDDEN_CALL_STATUS, KickTarget, ignore_sigpipe, install_forbidden_call_handler,
    install_kick_handler,
};
pub use tap::{open_tap, take_large_frames};
pub use track::{TrackError, WriteTracker};
