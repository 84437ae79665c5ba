//! Host sockets for datagrams of a guest.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Instant;

use forkd_net_proto::Reason;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, recv, send, socket_with,
};

use crate::dns::Asked;

/// One port of the guest that talks to one destination.
#[derive(Debug)]
pub struct UdpFlow {
    pub socket: OwnedFd,
    pub source_port: u16,
    pub to: Ipv4Addr,
    pub port: u16,
    pub started: Instant,
    /// When the last datagram came, from either side.
    pub used: Instant,
    pub up: u64,
    pub down: u64,
    pub name: Option<String>,
    pub reason: Reason,
}

/// A question that waits for a name server.
#[derive(Debug)]
pub struct DnsQuery {
    pub socket: OwnedFd,
    pub asked: Asked,
    pub message: Vec<u8>,
    pub asker: Asker,
    /// The exchange over TCP; `None` over UDP.
    pub exchange: Option<Exchange>,
    pub sent: Instant,
    /// The place of the next server to try.
    pub next_server: usize,
}

/// Where an answer goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asker {
    /// The guest sent a datagram from this port to this address.
    Datagram { source_port: u16, to: Ipv4Addr },
    /// The guest asked over a connection from this port to this address.
    Stream { source_port: u16, to: Ipv4Addr },
}

/// A question and its answer on a connection to a name server, each after its length.
#[derive(Debug, Default)]
pub struct Exchange {
    written: usize,
    got: Vec<u8>,
}

impl Exchange {
    /// Goes on with the exchange; the answer once it is there.
    pub fn advance(&mut self, socket: &OwnedFd, message: &[u8]) -> Result<Option<Vec<u8>>, Errno> {
        let whole = framed(message);
        while let Some(rest) = whole.get(self.written..).filter(|rest| !rest.is_empty()) {
            match send(socket, rest, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(count) => self.written += count,
                // Not connected yet, or full.
                Err(Errno::AGAIN | Errno::INTR | Errno::NOTCONN) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        let mut part = [0; 4096];
        loop {
            match recv(socket, &mut part[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(Errno::CONNRESET),
                Ok((_, len)) => self
                    .got
                    .extend_from_slice(part.get(..len).unwrap_or_default()),
                Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
                Err(error) => return Err(error),
            }
            if let Some((answer, _)) = unframed(&self.got) {
                return Ok(Some(answer.to_vec()));
            }
        }
    }
}

/// A message after its length, as DNS over TCP has it.
pub fn framed(message: &[u8]) -> Vec<u8> {
    let len = u16::try_from(message.len()).unwrap_or(u16::MAX);
    let mut whole = len.to_be_bytes().to_vec();
    whole.extend_from_slice(message.get(..usize::from(len)).unwrap_or_default());
    whole
}

/// The first message in the bytes, and the bytes after it; `None` if the message is not whole.
pub fn unframed(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk::<2>()?;
    rest.split_at_checked(usize::from(u16::from_be_bytes(*len)))
}

/// A socket that sends to and receives from one address.
pub fn open(to: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = match to.ip() {
        IpAddr::V4(_) => AddressFamily::INET,
        IpAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::DGRAM, flags, None)?;
    connect(&socket, &to)?;
    Ok(socket)
}

/// Sends a datagram. A full buffer loses it, as any network may.
pub fn put(socket: &OwnedFd, payload: &[u8]) -> Result<(), Errno> {
    match send(socket, payload, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
        Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => Ok(()),
        Err(error) => Err(error),
    }
}

/// The next datagram; `None` if there is none for now.
pub fn get(socket: &OwnedFd, buffer: &mut [u8]) -> Result<Option<usize>, Errno> {
    match recv(socket, buffer, RecvFlags::DONTWAIT | RecvFlags::TRUNC) {
        Ok((_, len)) => Ok(Some(len)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(error) => Err(error),
    }
}
