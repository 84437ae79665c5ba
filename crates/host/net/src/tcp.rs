//! The guest's end of one TCP connection, and the relay between it and a host socket.
//!
//! ```text
//!   Connecting ──host socket connected──► Peeking ──verdict──► Open ──both sides ended──► (gone)
//!       └──failed: reset──► (gone)           └──denied: reset──► (gone)
//! ```
//!
//! The guest's SYN is kept until the host socket is connected, so `connect` in the guest succeeds exactly if the
//! destination answered. Each connection has a smoltcp interface of its own: looking one up does not depend on how many
//! there are.

use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Checksum, ChecksumCapabilities, Device, DeviceCapabilities, Medium};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::Instant as StackTime;
use smoltcp::wire::{HardwareAddress, IpCidr, IpListenEndpoint};

use crate::out::FrameOut;
use crate::wire;

/// The most bytes that one turn moves in each direction, so that one flow does not starve the others.
pub const TURN: usize = 1 << 20;

/// The guest's end of a connection. A trait, so that another stack can take the place of smoltcp.
pub trait GuestTcp {
    /// Takes a packet of the guest and sends what is due.
    fn input(&mut self, packet: &[u8], out: &mut FrameOut, mac: [u8; 6], now: Instant);
    /// Takes a packet of the guest. [`GuestTcp::poll`] sends what is due, once for several packets.
    fn take(&mut self, packet: &[u8], out: &mut FrameOut, mac: [u8; 6], now: Instant);
    /// Sends what is due.
    fn poll(&mut self, out: &mut FrameOut, mac: [u8; 6], now: Instant);
    /// When to poll again if nothing happens.
    fn wake_at(&self) -> Option<Instant>;
    /// Bytes from the guest; the closure says how many it took.
    fn read(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> usize;
    /// Bytes of the guest wait to be read.
    fn has_bytes(&self) -> bool;
    /// The bytes that wait take more than half of the room.
    fn is_half_full(&self) -> bool;
    /// Copies the first bytes from the guest without taking them.
    fn first_bytes(&mut self, limit: usize) -> Vec<u8>;
    /// Room for bytes to the guest; the closure says how many it wrote.
    fn write(&mut self, fill: &mut dyn FnMut(&mut [u8]) -> usize) -> usize;
    /// The guest ended its direction, and every byte was read.
    fn is_read_to_end(&self) -> bool;
    /// Nothing more can go either way.
    fn is_closed(&self) -> bool;
    /// Ends the direction to the guest after the bytes that wait.
    fn finish(&mut self);
    /// Breaks the connection.
    fn abort(&mut self);
}

/// One interface with one socket.
pub struct Smoltcp {
    interface: Interface,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    /// The guest's maximum segment size.
    mss: u16,
    start: Instant,
    wake: Option<Instant>,
}

impl Smoltcp {
    /// Answers for one address and port, with buffers of this size.
    pub fn new(address: Ipv4Addr, port: u16, mss: u16, buffer: usize, now: Instant) -> Self {
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = rand::random();
        let mut interface = Interface::new(config, &mut Capabilities, StackTime::ZERO);
        interface.update_ip_addrs(|addresses| {
            // With a prefix of 0 the guest is a neighbour, and no route is needed.
            let _ = addresses.push(IpCidr::new(address.into(), 0));
        });
        let mut socket = Socket::new(
            SocketBuffer::new(vec![0; buffer]),
            SocketBuffer::new(vec![0; buffer]),
        );
        socket.set_nagle_enabled(false);
        socket.set_ack_delay(None);
        let endpoint = IpListenEndpoint {
            addr: Some(address.into()),
            port,
        };
        // Fails only for port 0, which `wire` refuses.
        let _ = socket.listen(endpoint);
        let mut sockets = SocketSet::new(Vec::with_capacity(1));
        let handle = sockets.add(socket);
        Self {
            interface,
            sockets,
            handle,
            mss,
            start: now,
            wake: None,
        }
    }

    fn run(&mut self, packet: Option<&[u8]>, out: &mut FrameOut, mac: [u8; 6], now: Instant) {
        let time = self.time(now);
        let mut link = Link {
            packet,
            out,
            mac,
            mss: self.mss,
        };
        self.interface.poll(time, &mut link, &mut self.sockets);
        let delay = self.interface.poll_delay(time, &self.sockets);
        self.wake = delay.map(|delay| now + Duration::from_micros(delay.total_micros()));
    }

    fn time(&self, now: Instant) -> StackTime {
        let passed = now.saturating_duration_since(self.start).as_micros();
        StackTime::from_micros(i64::try_from(passed).unwrap_or(i64::MAX))
    }

    fn socket(&self) -> &Socket<'static> {
        self.sockets.get(self.handle)
    }

    fn socket_mut(&mut self) -> &mut Socket<'static> {
        self.sockets.get_mut(self.handle)
    }
}

impl GuestTcp for Smoltcp {
    fn input(&mut self, packet: &[u8], out: &mut FrameOut, mac: [u8; 6], now: Instant) {
        self.run(Some(packet), out, mac, now);
    }

    fn take(&mut self, packet: &[u8], out: &mut FrameOut, mac: [u8; 6], now: Instant) {
        let time = self.time(now);
        let mut link = Link {
            packet: Some(packet),
            out,
            mac,
            mss: self.mss,
        };
        self.interface
            .poll_ingress_single(time, &mut link, &mut self.sockets);
    }

    fn poll(&mut self, out: &mut FrameOut, mac: [u8; 6], now: Instant) {
        self.run(None, out, mac, now);
    }

    fn wake_at(&self) -> Option<Instant> {
        self.wake
    }

    fn read(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> usize {
        let taken = self.socket_mut().recv(|bytes| {
            let taken = take(bytes).min(bytes.len());
            (taken, taken)
        });
        taken.unwrap_or(0)
    }

    fn has_bytes(&self) -> bool {
        self.socket().recv_queue() > 0
    }

    fn is_half_full(&self) -> bool {
        let socket = self.socket();
        socket.recv_queue() > socket.recv_capacity() / 2
    }

    fn first_bytes(&mut self, limit: usize) -> Vec<u8> {
        self.socket_mut().peek(limit).unwrap_or_default().to_vec()
    }

    fn write(&mut self, fill: &mut dyn FnMut(&mut [u8]) -> usize) -> usize {
        let filled = self.socket_mut().send(|room| {
            let filled = fill(room).min(room.len());
            (filled, filled)
        });
        filled.unwrap_or(0)
    }

    fn is_read_to_end(&self) -> bool {
        let socket = self.socket();
        !socket.may_recv()
            && socket.recv_queue() == 0
            && !matches!(socket.state(), State::Listen | State::SynReceived)
    }

    fn is_closed(&self) -> bool {
        matches!(self.socket().state(), State::Closed | State::TimeWait)
    }

    fn finish(&mut self) {
        self.socket_mut().close();
    }

    fn abort(&mut self) {
        self.socket_mut().abort();
    }
}

/// Only what an interface asks for when it is made.
struct Capabilities;

/// The way of packets between an interface and the guest during one poll.
struct Link<'a> {
    packet: Option<&'a [u8]>,
    out: &'a mut FrameOut,
    mac: [u8; 6],
    mss: u16,
}

struct Received<'a>(&'a [u8]);

struct Sending<'a> {
    out: &'a mut FrameOut,
    mac: [u8; 6],
    mss: u16,
}

fn capabilities() -> DeviceCapabilities {
    let mut capabilities = DeviceCapabilities::default();
    capabilities.medium = Medium::Ip;
    capabilities.max_transmission_unit = 65535;
    capabilities.checksum = ChecksumCapabilities::ignored();
    capabilities.checksum.ipv4 = Checksum::Tx;
    capabilities
}

impl Device for Capabilities {
    type RxToken<'a> = Received<'a>;
    type TxToken<'a> = Sending<'a>;

    fn receive(&mut self, _: StackTime) -> Option<(Received<'_>, Sending<'_>)> {
        None
    }

    fn transmit(&mut self, _: StackTime) -> Option<Sending<'_>> {
        None
    }

    fn capabilities(&self) -> DeviceCapabilities {
        capabilities()
    }
}

impl Device for Link<'_> {
    type RxToken<'a>
        = Received<'a>
    where
        Self: 'a;
    type TxToken<'a>
        = Sending<'a>
    where
        Self: 'a;

    fn receive(&mut self, now: StackTime) -> Option<(Received<'_>, Sending<'_>)> {
        let packet = self.packet.take()?;
        let _ = now;
        let (mac, mss) = (self.mac, self.mss);
        let sending = Sending {
            out: self.out,
            mac,
            mss,
        };
        Some((Received(packet), sending))
    }

    fn transmit(&mut self, _: StackTime) -> Option<Sending<'_>> {
        self.out.is_open().then_some(Sending {
            out: self.out,
            mac: self.mac,
            mss: self.mss,
        })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        capabilities()
    }
}

impl smoltcp::phy::RxToken for Received<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0)
    }
}

impl smoltcp::phy::TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut frame = self.out.buffer(wire::HEADERS + len);
        wire::address_ipv4(&mut frame, self.mac);
        let (_, packet) = frame.split_at_mut(wire::HEADERS);
        let result = f(packet);
        wire::finish(&mut frame, self.mss);
        self.out.send(frame);
        result
    }
}

/// The host's end of a connection. Readiness is edge-triggered: a flag is cleared when the kernel says "not now".
#[derive(Debug)]
pub struct HostSocket {
    pub fd: OwnedFd,
    pub readable: bool,
    pub writable: bool,
    /// The peer ended its direction.
    pub ended: bool,
    /// We ended ours.
    pub finished: bool,
}

/// How a relay stands after a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Relay {
    /// Waits for an event.
    Waiting,
    /// There is more to do, and the turn allowed no more.
    Busy,
    /// Both directions ended.
    Done,
    /// One side broke the connection.
    Broken,
}

/// Bytes that a turn moved.
#[derive(Debug, Default, Clone, Copy)]
pub struct Moved {
    pub up: u64,
    pub down: u64,
}

impl Moved {
    pub fn add(&mut self, turn: Self) {
        self.up += turn.up;
        self.down += turn.down;
    }
}

/// The most bytes that a turn may move.
#[derive(Debug, Clone, Copy)]
pub struct Allowance {
    pub up: usize,
    pub down: usize,
}

/// Moves bytes both ways until neither side has or takes any, or the turn is over. Returns the bytes of this turn.
pub fn relay(
    guest: &mut impl GuestTcp,
    host: &mut HostSocket,
    allowed: Allowance,
) -> (Relay, Moved) {
    let mut broken = false;
    let up = upward(guest, host, allowed.up, &mut broken);
    let down = downward(guest, host, allowed.down, &mut broken);
    let moved = Moved {
        up: up as u64,
        down: down as u64,
    };
    let limited = (up == allowed.up && guest.has_bytes())
        || (down == allowed.down && host.readable && !host.ended);
    (after(guest, host, broken, limited), moved)
}

fn after(guest: &mut impl GuestTcp, host: &mut HostSocket, broken: bool, limited: bool) -> Relay {
    if broken {
        guest.abort();
        return Relay::Broken;
    }
    if guest.is_read_to_end() && !host.finished && !guest.is_closed() {
        host.finished = true;
        let _ = shutdown(&host.fd, Shutdown::Write);
    }
    if guest.is_closed() {
        return match host.ended && (host.finished || guest.is_read_to_end()) {
            true => Relay::Done,
            false => Relay::Broken,
        };
    }
    match limited {
        true => Relay::Busy,
        false => Relay::Waiting,
    }
}

fn upward(
    guest: &mut impl GuestTcp,
    host: &mut HostSocket,
    allowed: usize,
    broken: &mut bool,
) -> usize {
    let mut total = 0;
    while host.writable && total < allowed {
        let taken = guest.read(&mut |bytes| {
            let bytes = bytes.get(..allowed - total).unwrap_or(bytes);
            if bytes.is_empty() {
                return 0;
            }
            match send(&host.fd, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(count) => count,
                Err(Errno::INTR) => 0,
                Err(Errno::AGAIN) => {
                    host.writable = false;
                    0
                }
                Err(_) => {
                    *broken = true;
                    host.writable = false;
                    0
                }
            }
        });
        if taken == 0 {
            break;
        }
        total += taken;
    }
    total
}

fn downward(
    guest: &mut impl GuestTcp,
    host: &mut HostSocket,
    allowed: usize,
    broken: &mut bool,
) -> usize {
    let mut total = 0;
    while host.readable && !host.ended && total < allowed {
        let mut end = false;
        let filled = guest.write(&mut |room| {
            let most = room.len().min(allowed - total);
            let Some(room) = room.get_mut(..most).filter(|room| !room.is_empty()) else {
                return 0;
            };
            match recv(&host.fd, &mut *room, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => {
                    end = true;
                    0
                }
                Ok((_, count)) => count,
                Err(Errno::INTR) => 0,
                Err(Errno::AGAIN) => {
                    host.readable = false;
                    0
                }
                Err(_) => {
                    *broken = true;
                    host.readable = false;
                    0
                }
            }
        });
        if end {
            host.ended = true;
            guest.finish();
        }
        if filled == 0 {
            break;
        }
        total += filled;
    }
    total
}
