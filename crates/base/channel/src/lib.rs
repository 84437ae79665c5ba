//! Packets with descriptors over a `SOCK_SEQPACKET` Unix socket: the one implementation for every process that speaks
//! `forkd_vmm_proto`.
//!
//! [`Channel`] blocks, or not, as its socket does. Programs with a reactor of their own use [`send`] and [`recv`] on any
//! descriptor that does not block.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use forkd_vmm_proto::MAX_FDS;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair,
};
use thiserror::Error;

/// One end of a connected `SOCK_SEQPACKET` socket.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

/// A packet and what came with it.
#[derive(Debug)]
pub struct Received {
    /// How much of the buffer was filled.
    pub len: usize,
    /// The descriptors, in the order they were sent.
    pub fds: Vec<OwnedFd>,
}

/// Why a packet was not sent or received.
#[derive(Debug, Error)]
pub enum ChannelError {
    /// The other end is closed.
    #[error("the other end of the channel is closed")]
    Closed,
    /// The packet or its descriptors were larger than the reader allows.
    #[error(
        "a packet was cut off: it is larger than {limit} bytes or carries over {MAX_FDS} descriptors"
    )]
    Truncated {
        /// The size of the reader's buffer.
        limit: usize,
    },
    /// Too many descriptors to send.
    #[error("{count} descriptors are over the limit of {MAX_FDS} for one packet")]
    TooManyFds { count: usize },
    /// The kernel refused.
    #[error("the channel failed")]
    Io(#[source] io::Error),
}

impl Channel {
    /// Two connected ends, both closed on exec.
    pub fn pair() -> Result<(Self, Self), ChannelError> {
        let (a, b) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|e| ChannelError::Io(e.into()))?;
        Ok((Self { socket: a }, Self { socket: b }))
    }

    /// Takes over a connected socket.
    pub fn from_fd(socket: OwnedFd) -> Self {
        Self { socket }
    }

    /// [`send`] on this end.
    pub fn send(&self, packet: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
        send(&self.socket, packet, fds)
    }

    /// [`recv`] on this end.
    pub fn recv(&self, buffer: &mut [u8]) -> Result<Received, ChannelError> {
        recv(&self.socket, buffer)
    }
}

/// Sends one packet with descriptors. On a socket that blocks it waits while the other end's buffer is full.
pub fn send(socket: impl AsFd, packet: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
    if fds.len() > MAX_FDS {
        return Err(ChannelError::TooManyFds { count: fds.len() });
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    loop {
        let sent = sendmsg(
            &socket,
            &[IoSlice::new(packet)],
            &mut control,
            SendFlags::NOSIGNAL,
        );
        return match sent {
            Ok(_) => Ok(()),
            Err(rustix::io::Errno::INTR) => continue,
            Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => {
                Err(ChannelError::Closed)
            }
            Err(e) => Err(ChannelError::Io(e.into())),
        };
    }
}

/// Receives one packet. On a socket that blocks it waits for one.
pub fn recv(socket: impl AsFd, buffer: &mut [u8]) -> Result<Received, ChannelError> {
    let limit = buffer.len();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = loop {
        match recvmsg(
            &socket,
            &mut [IoSliceMut::new(buffer)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        ) {
            Ok(message) => break message,
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::CONNRESET) => return Err(ChannelError::Closed),
            Err(e) => return Err(ChannelError::Io(e.into())),
        }
    };
    let mut fds = Vec::new();
    for item in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = item {
            fds.extend(rights);
        }
    }
    if message
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
    {
        return Err(ChannelError::Truncated { limit });
    }
    if message.bytes == 0 {
        return Err(ChannelError::Closed);
    }
    Ok(Received {
        len: message.bytes,
        fds,
    })
}

/// For reactors, which look for [`io::ErrorKind::WouldBlock`].
impl From<ChannelError> for io::Error {
    fn from(error: ChannelError) -> Self {
        match error {
            ChannelError::Io(error) => error,
            ChannelError::Closed => io::ErrorKind::BrokenPipe.into(),
            other => Self::new(io::ErrorKind::InvalidData, other),
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl From<Channel> for OwnedFd {
    fn from(channel: Channel) -> Self {
        channel.socket
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};

    use super::*;

    #[test]
    fn a_descriptor_travels_with_its_packet() {
        let (a, b) = Channel::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"inside").unwrap();
        file.rewind().unwrap();
        a.send(b"hello", &[file.as_fd()]).unwrap();

        let mut buffer = [0; 16];
        let got = b.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..got.len], b"hello");
        let mut text = String::new();
        std::fs::File::from(got.fds.into_iter().next().unwrap())
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(text, "inside");
    }

    #[test]
    fn a_packet_larger_than_the_buffer_is_an_error() {
        let (a, b) = Channel::pair().unwrap();
        a.send(&[1; 32], &[]).unwrap();
        assert!(matches!(
            b.recv(&mut [0; 16]),
            Err(ChannelError::Truncated { limit: 16 })
        ));
    }

    #[test]
    fn a_closed_end_is_seen() {
        let (a, b) = Channel::pair().unwrap();
        drop(a);
        assert!(matches!(b.recv(&mut [0; 16]), Err(ChannelError::Closed)));
        assert!(matches!(b.send(b"x", &[]), Err(ChannelError::Closed)));
    }
}
