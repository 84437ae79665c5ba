//! The system calls that no safe wrapper covers, by subject. The only module of the agent with `unsafe` code.
//!
//! `node_addon.rs` is no module of the agent: `build.rs` compiles it into a shared object of its own.
#![allow(unsafe_code)]

mod interface;
mod kernel;
mod process;
mod socket;

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::unix::AsyncFd;

pub use interface::{
    add_address6, add_default_route6, address4, link_up, mac, set_address4, set_default_route4,
    set_mac, set_mtu,
};
pub use kernel::{add_entropy, hold_writes, set_hostname, trim};
pub use process::{
    ChildSetup, Reaped, anybody_else, prepare_child, raise_priority, reap_one, signal_everybody,
};
pub use socket::{break_connection, expected_sequence, take_descriptor};

/// The entry point. The runtime of the standard library is left out because it aborts when it finds no
/// open standard descriptors and no `/dev/null`, which is how a kernel may start PID 1.
#[cfg(not(test))]
#[unsafe(no_mangle)]
pub extern "C" fn main(_argc: libc::c_int, _argv: *const *const libc::c_char) -> libc::c_int {
    crate::start()
}

/// Prepares the process before any thread exists: broken pipes are errors, and the heap is one arena that gives memory
/// back.
pub fn prepare_self() {
    // SAFETY: plain calls with constant arguments, made before any other thread runs.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        libc::mallopt(libc::M_ARENA_MAX, 1);
        // Above the size of the buffers that come and go with every frame.
        libc::mallopt(libc::M_MMAP_THRESHOLD, 512 * 1024);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 512 * 1024);
    }
}

/// A descriptor that the event loop watches.
pub fn watched(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an owned descriptor stays the same open descriptor until it is dropped, and the returned
    // value owns it and takes it off the event loop first.
    unsafe { AsyncFd::register(fd) }.map_err(Into::into)
}

/// Opens the standard descriptors that are closed: the console where there is one. Programs started by an
/// agent without them would find their files under these numbers.
pub fn open_standard_descriptors() {
    for path in [c"/dev/console", c"/dev/null"] {
        loop {
            // SAFETY: plain calls with a constant path; descriptors above 2 are closed again, the others are
            // meant to stay open for ever.
            let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_NOCTTY) };
            if fd > 2 {
                // SAFETY: it was opened just above and has no other user.
                unsafe { libc::close(fd) };
                return;
            }
            if fd < 0 {
                break;
            }
        }
    }
}
