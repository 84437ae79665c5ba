//! The descriptor that carries frames.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use forkd_vmm_proto::NetBackend;
use rustix::io::Errno;

/// Length of the header before every frame, in a virtqueue and on every back end.
pub(super) const VNET_HEADER: usize = 12;
/// The largest frame: a segment of 64 KiB that is cut later, and its Ethernet header.
pub(super) const MAX_FRAME: usize = 65535 + 18;

/// The fate of a frame for the network.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// It is on its way.
    Yes,
    /// There is no room for it now.
    Later,
    /// The frame was refused, or there is no peer.
    Never,
}

/// The result of reading a frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// Header and frame of this length together.
    Frame(usize),
    /// None for now.
    Nothing,
    /// There will not be any more.
    End,
}

/// A descriptor that carries frames.
#[derive(Debug)]
pub(super) struct Backend {
    fd: OwnedFd,
    kind: NetBackend,
}

impl Backend {
    pub(super) fn new(fd: OwnedFd, kind: NetBackend) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Self { fd, kind })
    }

    /// Reads a header and the frame after it.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> Received {
        match rustix::io::read(&self.fd, buffer) {
            Ok(0) => Received::End,
            Ok(count) => Received::Frame(count),
            Err(Errno::AGAIN | Errno::INTR) => Received::Nothing,
            Err(_) => Received::End,
        }
    }

    /// Writes a frame that has its header before it.
    pub(super) fn send(&self, packet: &[u8]) -> Sent {
        let result = match self.kind {
            NetBackend::Tap => rustix::io::write(&self.fd, packet),
            NetBackend::Socket => {
                rustix::net::send(&self.fd, packet, rustix::net::SendFlags::NOSIGNAL)
            }
        };
        match result {
            Ok(_) => Sent::Yes,
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => Sent::Later,
            Err(_) => Sent::Never,
        }
    }
}

impl AsFd for Backend {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
