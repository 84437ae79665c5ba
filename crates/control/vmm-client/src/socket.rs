//! A `SOCK_SEQPACKET` socket on tokio's reactor.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use forkd_vmm_proto::{MAX_FDS, MAX_MESSAGE};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// One end of a connected socket.
#[derive(Debug)]
pub struct Socket {
    inner: AsyncFd<OwnedFd>,
}

/// A packet and the descriptors that came with it.
#[derive(Debug)]
pub struct Packet {
    pub bytes: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Socket {
    /// Takes over a connected socket.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let flags = fcntl_getfl(&fd)?;
        fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        Ok(Self {
            inner: AsyncFd::register(fd)?,
        })
    }

    /// Sends one packet.
    pub async fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        if fds.len() > MAX_FDS {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "too many descriptors",
            ));
        }
        self.inner
            .async_io(Interest::WRITABLE, |fd| {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                if !fds.is_empty() {
                    control.push(SendAncillaryMessage::ScmRights(fds));
                }
                sendmsg(
                    fd,
                    &[IoSlice::new(bytes)],
                    &mut control,
                    SendFlags::NOSIGNAL,
                )?;
                Ok(())
            })
            .await
    }

    /// Receives one packet; `None` once the other end is closed.
    pub async fn recv(&self) -> io::Result<Option<Packet>> {
        self.inner.async_io(Interest::READABLE, receive).await
    }
}

fn receive(fd: &OwnedFd) -> io::Result<Option<Packet>> {
    let mut bytes = vec![0; MAX_MESSAGE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        fd,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut fds = Vec::new();
    for item in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = item {
            fds.extend(rights);
        }
    }
    if received
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
    {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a packet was cut off",
        ));
    }
    bytes.truncate(received.bytes);
    Ok((received.bytes > 0).then_some(Packet { bytes, fds }))
}
