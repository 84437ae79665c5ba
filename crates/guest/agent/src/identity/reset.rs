//! Resets a connection of this host as its peer would, without a packet that leaves the host.
//!
//! The kernel has no call that ends a connection with `ECONNRESET` and stays silent. [`connection`] therefore sends the
//! reset of the peer to this host itself: a raw packet from the peer's address, with the one sequence number that the
//! kernel accepts. The packet goes over the loopback interface. Programs know how to handle `ECONNRESET`; they retry.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;

use rustix::net::{
    AddressFamily, SendFlags, SocketFlags, SocketType, getpeername, getsockname, ipproto, sendto,
    socket_with,
};

use crate::sys;

const IP_HEADER: usize = 20;
const SEGMENT: usize = 20;
/// No options.
const DATA_OFFSET: u8 = 0x50;
const RST: u8 = 0x04;
const TCP: u8 = 6;

/// Ends a connection. Where a reset cannot be delivered, the connection is aborted instead.
pub fn connection(socket: &OwnedFd) -> io::Result<()> {
    match deliver(socket) {
        Ok(true) => Ok(()),
        Ok(false) | Err(_) => sys::break_connection(socket),
    }
}

/// Sends the reset. False if the connection is still there: the kernel of this host did not take the packet, or the
/// connection belongs to another network namespace.
fn deliver(socket: &OwnedFd) -> io::Result<bool> {
    let (Some(own), Some(peer)) = (
        ipv4(getsockname(socket)?),
        getpeername(socket)?.and_then(ipv4),
    ) else {
        return Ok(false);
    };
    let sequence = sys::expected_sequence(socket)?;
    let kind = (AddressFamily::INET, SocketType::RAW);
    let raw = socket_with(kind.0, kind.1, SocketFlags::CLOEXEC, Some(ipproto::RAW))?;
    let to = SocketAddrV4::new(*own.ip(), 0);
    sendto(&raw, &packet(peer, own, sequence), SendFlags::empty(), &to)?;
    // A connection that was reset has no peer.
    Ok(!matches!(getpeername(socket), Ok(Some(_))))
}

/// The address, also of an IPv6 socket that speaks IPv4.
fn ipv4(address: rustix::net::SocketAddrAny) -> Option<SocketAddrV4> {
    let address = SocketAddr::try_from(address).ok()?;
    match address.ip().to_canonical() {
        IpAddr::V4(ip) => Some(SocketAddrV4::new(ip, address.port())),
        IpAddr::V6(_) => None,
    }
}

/// A reset with an IPv4 header. The kernel fills the checksum of the header in.
fn packet(from: SocketAddrV4, to: SocketAddrV4, sequence: u32) -> Vec<u8> {
    let mut segment = Vec::with_capacity(SEGMENT);
    segment.extend(from.port().to_be_bytes());
    segment.extend(to.port().to_be_bytes());
    segment.extend(sequence.to_be_bytes());
    segment.extend([0; 4]);
    segment.extend([DATA_OFFSET, RST]);
    // Window, checksum, urgent pointer.
    segment.extend([0; 6]);
    let sum = checksum(*from.ip(), *to.ip(), &segment).to_be_bytes();
    for (place, byte) in segment.iter_mut().skip(16).zip(sum) {
        *place = byte;
    }
    let length = u16::try_from(IP_HEADER + SEGMENT).unwrap_or_default();
    let mut packet = vec![0x45, 0];
    packet.extend(length.to_be_bytes());
    packet.extend([0, 0, 0, 0, 64, TCP, 0, 0]);
    packet.extend(from.ip().octets());
    packet.extend(to.ip().octets());
    packet.extend(segment);
    packet
}

/// The checksum of a segment with an even length.
fn checksum(from: Ipv4Addr, to: Ipv4Addr, segment: &[u8]) -> u16 {
    let length = u8::try_from(segment.len()).unwrap_or_default();
    let mut pseudo = Vec::from(from.octets());
    pseudo.extend(to.octets());
    pseudo.extend([0, TCP, 0, length]);
    pseudo.extend(segment);
    let words = pseudo.chunks_exact(2).map(|pair| match pair {
        [high, low] => u32::from(u16::from_be_bytes([*high, *low])),
        _ => 0,
    });
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};

    /// Both ends of a connection over the loopback interface.
    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    fn may_test() -> bool {
        let root = rustix::process::geteuid().is_root();
        if !root {
            eprintln!("not root: nothing was tested");
        }
        root
    }

    #[test]
    fn a_waiting_reader_gets_a_reset_and_the_peer_gets_nothing() {
        if !may_test() {
            return;
        }
        let (reset, mut peer) = pair();
        peer.write_all(b"before").unwrap();
        let mut reader = reset.try_clone().unwrap();
        let (sender, begun) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn(move || {
            let mut got = [0; 6];
            reader.read_exact(&mut got).unwrap();
            sender.send(got).unwrap();
            reader.read(&mut [0]).map_err(|error| error.kind())
        });
        assert_eq!(&begun.recv().unwrap(), b"before");
        connection(&OwnedFd::from(reset)).unwrap();
        let end = waiting.join().unwrap();
        assert_eq!(end, Err(ErrorKind::ConnectionReset));
        peer.set_nonblocking(true).unwrap();
        let silent = peer.read(&mut [0]).unwrap_err();
        assert_eq!(silent.kind(), ErrorKind::WouldBlock);
        assert!(peer.peer_addr().is_ok());
    }

    #[test]
    fn the_checksum_is_that_of_the_standard() {
        let from: SocketAddrV4 = "198.51.100.7:443".parse().unwrap();
        let to: SocketAddrV4 = "10.42.0.2:40000".parse().unwrap();
        let packet = packet(from, to, 0x0102_0304);
        let (header, segment) = packet.split_at(IP_HEADER);
        assert_eq!(header.len() + segment.len(), 40);
        // A segment with a correct checksum adds up to zero.
        assert_eq!(checksum(*from.ip(), *to.ip(), segment), 0);
    }
}
