//! One connected controller.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use forkd_sys::{Channel, ChannelError};
use forkd_vmm_proto::spawn::{FromSpawn, SpawnRequest};
use forkd_vmm_proto::{MAX_MESSAGE, decode, encode};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{SocketFlags, accept_with};
use rustix::process::{Uid, geteuid};

/// The most messages that wait for a controller that does not read.
const MAX_WAITING: usize = 4096;

/// A connection and what waits to be sent on it.
#[derive(Debug)]
pub struct Client {
    socket: Channel,
    waiting: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    overflowed: bool,
    /// The hello has been said.
    pub greeted: bool,
}

/// The result of one read from the socket.
#[derive(Debug)]
pub enum Received {
    /// Nothing more for now.
    Nothing,
    /// The controller is gone, or has said something that is no message.
    Closed,
    /// A request with its descriptors.
    Message(SpawnRequest, Vec<OwnedFd>),
}

impl Client {
    /// Accepts a connection if one waits. A controller of another user is refused, even if it may open the socket file.
    pub fn accept(listener: BorrowedFd<'_>) -> Option<Self> {
        let socket = accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).ok()?;
        let peer = socket_peercred(&socket).ok()?.uid;
        if !is_trusted(peer, geteuid()) {
            crate::say(&format!(
                "a connection of user {} is refused",
                peer.as_raw()
            ));
            return None;
        }
        let socket = Channel::from_fd(socket);
        Some(Self {
            socket,
            waiting: VecDeque::new(),
            overflowed: false,
            greeted: false,
        })
    }

    /// The socket, to be watched.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Reads one request.
    pub fn receive(&mut self) -> Received {
        let mut buffer = vec![0; MAX_MESSAGE];
        match self.socket.recv(&mut buffer) {
            Ok(packet) => match decode(&buffer[..packet.len]) {
                Ok(request) => Received::Message(request, packet.fds),
                Err(error) => {
                    crate::say(&format!("a controller is disconnected: {error}"));
                    Received::Closed
                }
            },
            Err(error) if would_block(&error) => Received::Nothing,
            Err(_) => Received::Closed,
        }
    }

    /// Puts a message in line.
    pub fn queue(&mut self, message: &FromSpawn, sockets: Vec<OwnedFd>) {
        match encode(message) {
            Ok(bytes) if self.waiting.len() < MAX_WAITING => {
                self.waiting.push_back((bytes, sockets));
            }
            Ok(_) => self.overflowed = true,
            // Replies are bounded far below the limit of a packet, so this is our own mistake.
            Err(error) => crate::say(&format!("a reply does not encode: {error}")),
        }
    }

    /// Sends what the socket takes. True when nothing is left; an error ends the connection.
    pub fn flush(&mut self) -> io::Result<bool> {
        if self.overflowed {
            return Err(io::Error::other("the controller does not read"));
        }
        while let Some((bytes, sockets)) = self.waiting.front() {
            let borrowed: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
            match self.socket.send(bytes, &borrowed) {
                Ok(()) => {
                    self.waiting.pop_front();
                }
                Err(error) if would_block(&error) => return Ok(false),
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(true)
    }
}

/// There is nothing to read, or no room to write, for now.
pub fn would_block(error: &ChannelError) -> bool {
    matches!(error, ChannelError::Io(cause) if cause.kind() == io::ErrorKind::WouldBlock)
}

/// A controller may have every VM, so it is this user or root.
fn is_trusted(peer: Uid, own: Uid) -> bool {
    peer == own || peer.is_root()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_user_and_root_are_controllers() {
        let [root, own, other] = [0, 1000, 1001].map(Uid::from_raw);
        assert!(is_trusted(own, own));
        assert!(is_trusted(root, own));
        assert!(!is_trusted(other, own));
        assert!(!is_trusted(other, root));
    }

    #[test]
    fn the_kernel_names_the_user_of_a_connection() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("spawn.sock");
        let listener = forkd_os::seqpacket::listen_on(&path).unwrap();
        assert!(Client::accept(listener.as_fd()).is_none(), "nothing waits");
        let _controller = forkd_os::seqpacket::listen_on(&path).unwrap_err();
        // The look for another listener was a connection, and it came from this user.
        assert!(Client::accept(listener.as_fd()).is_some());
    }
}
