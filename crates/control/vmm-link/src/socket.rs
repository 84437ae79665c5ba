//! A `SOCK_SEQPACKET` socket on tokio's reactor.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use forkd_channel::ChannelError;
use forkd_vmm_proto::MAX_MESSAGE;
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
        self.inner
            .async_io(Interest::WRITABLE, || {
                Ok(forkd_channel::send(&self.inner, bytes, fds)?)
            })
            .await
    }

    /// Receives one packet; `None` once the other end is closed.
    pub async fn recv(&self) -> io::Result<Option<Packet>> {
        self.inner
            .async_io(Interest::READABLE, || {
                let mut bytes = vec![0; MAX_MESSAGE];
                match forkd_channel::recv(&self.inner, &mut bytes) {
                    Ok(received) => {
                        bytes.truncate(received.len);
                        let fds = received.fds;
                        Ok(Some(Packet { bytes, fds }))
                    }
                    Err(ChannelError::Closed) => Ok(None),
                    Err(error) => Err(error.into()),
                }
            })
            .await
    }
}
