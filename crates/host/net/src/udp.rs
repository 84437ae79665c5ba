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
    /// Where the guest sent its question from, and to.
    pub source_port: u16,
    pub to: Ipv4Addr,
    pub sent: Instant,
    /// The place of the next server to try.
    pub next_server: usize,
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
