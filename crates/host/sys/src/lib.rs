//! Safe wrappers over the system calls the host programs need.
//!
//! What rustix already offers is used from there; here is what it does not have, and the few places
//! where a system call needs an `unsafe` block with a reason.

#[cfg(any(test, feature = "test-utils"))]
pub mod filter_probe;
mod fork;
mod heap;
mod inherit;
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
pub use tap::open_tap;
pub use track::{TrackError, WriteTracker};
