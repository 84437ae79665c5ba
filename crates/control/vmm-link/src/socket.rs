//! A `SOCK_SEQPACKET` socket on tokio's reactor.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use forkd_vmm_proto::{MAX_FDS, MAX_MESSAGE};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// One end of a connected socket.
#[derive(Debug)]
pub struct Socket {
    /// Named a stream, used by packet: tokio only watches when it is ready.
    inner: UnixStream,
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
        let socket = std::os::unix::net::UnixStream::from(fd);
        socket.set_nonblocking(true)?;
        Ok(Self {
            inner: UnixStream::from_std(socket)?,
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
            .async_io(Interest::WRITABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                if !fds.is_empty() {
                    control.push(SendAncillaryMessage::ScmRights(fds));
                }
                sendmsg(
                    &self.inner,
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
        self.inner
            .async_io(Interest::READABLE, || receive(self.inner.as_fd()))
            .await
    }
}

fn receive(fd: BorrowedFd<'_>) -> io::Result<Option<Packet>> {
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
