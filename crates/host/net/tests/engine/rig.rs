//! The engine as a process, and guests as TCP stacks in memory.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use forkd_channel::Channel;
use forkd_net::wire;
use forkd_net_proto::{
    FdIndex, FlowRecord, FromNet, NET_VERSION, NetCommand, NetError, NetReply, NetRequest,
    NetStats, decode, encode,
};
use forkd_types::{Mode, Policy};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{ChecksumCapabilities, Device, DeviceCapabilities, Medium};
use smoltcp::socket::tcp::{Socket, SocketBuffer};
use smoltcp::time::Instant as StackTime;
use smoltcp::wire::{HardwareAddress, IpCidr, Ipv4Packet, UdpPacket};

/// A test that waits longer has failed.
const PATIENCE: Duration = Duration::from_secs(60);
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];

pub fn policy(mode: Mode, rules: &[&str]) -> Policy {
    let rules = rules.iter().map(|rule| rule.parse().unwrap()).collect();
    Policy::new(mode, rules, Default::default()).unwrap()
}

pub struct Engine {
    process: Child,
    folder: tempfile::TempDir,
    control: Channel,
}

impl Engine {
    pub fn start(resolvers: &[SocketAddr]) -> Self {
        Self::start_with(&[], resolvers)
    }

    /// Starts the engine through another program, which takes the engine as its last argument.
    pub fn start_with(before: &[&str], resolvers: &[SocketAddr]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let engine = super::ENGINE;
        let mut command = match before {
            [] => Command::new(engine),
            [first, rest @ ..] => {
                let mut command = Command::new(first);
                command.args(rest).arg(engine);
                command
            }
        };
        command.arg("--socket").arg(folder.path().join("net.sock"));
        for resolver in resolvers {
            command.arg("--resolver").arg(resolver.to_string());
        }
        let process = command.spawn().unwrap();
        let control = dial(folder.path());
        let engine = Self {
            process,
            folder,
            control,
        };
        engine.hello();
        engine
    }

    fn hello(&self) {
        let hello = self
            .ask(
                NetCommand::Hello {
                    version: NET_VERSION,
                },
                &[],
            )
            .unwrap();
        assert!(matches!(
            hello,
            NetReply::Hello {
                version: NET_VERSION,
                ..
            }
        ));
    }

    /// Another controller takes the place of this one.
    pub fn reconnect(&mut self) {
        self.control = dial(self.folder.path());
        self.hello();
    }

    pub fn ask(&self, command: NetCommand, fds: &[BorrowedFd<'_>]) -> Result<NetReply, NetError> {
        self.control
            .send(&encode(&NetRequest { seq: 7, command }).unwrap(), fds)
            .unwrap();
        loop {
            if let FromNet::Response { seq: 7, result } = self.next_event() {
                return result;
            }
        }
    }

    pub fn next_event(&self) -> FromNet {
        let mut buffer = vec![0; 65536];
        let received = self.control.recv(&mut buffer).unwrap();
        decode(&buffer[..received.len]).unwrap()
    }

    pub fn done(&self, command: NetCommand) {
        assert_eq!(self.ask(command, &[]), Ok(NetReply::Done));
    }

    pub fn stats(&self, id: &str) -> NetStats {
        match self
            .ask(
                NetCommand::Stats {
                    id: id.parse().unwrap(),
                },
                &[],
            )
            .unwrap()
        {
            NetReply::Stats(stats) => stats,
            other => panic!("{other:?}"),
        }
    }

    /// The newest entries of the log.
    pub fn log(&self, id: &str) -> Vec<FlowRecord> {
        match self
            .ask(
                NetCommand::Log {
                    id: id.parse().unwrap(),
                    after: 0,
                },
                &[],
            )
            .unwrap()
        {
            NetReply::Log { entries, .. } => entries,
            other => panic!("{other:?}"),
        }
    }

    fn plug(&self, id: &str, policy: &Policy) -> OwnedFd {
        let (ours, theirs) = Channel::pair().unwrap();
        let attach = NetCommand::Attach {
            id: id.parse().unwrap(),
            policy: policy.clone().without_inject(),
            brokered: policy.inject().iter().map(|rule| rule.to.clone()).collect(),
            generation: 1,
            frames: FdIndex(0),
        };
        assert_eq!(self.ask(attach, &[theirs.as_fd()]), Ok(NetReply::Done));
        ours.into()
    }

    pub fn attach(&self, id: &str, policy: &Policy) -> Guest {
        Guest::new(self.plug(id, policy))
    }

    /// A guest with the memory of another one, as after a live fork. The source stands still meanwhile.
    pub fn attach_stack(&self, id: &str, policy: &Policy, source: &mut Guest) -> Guest {
        let socket = self.plug(id, policy);
        let blank = Guest::new(socket);
        let mut child = std::mem::replace(source, blank);
        std::mem::swap(&mut child.link.socket, &mut source.link.socket);
        child
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn dial(folder: &std::path::Path) -> Channel {
    let address = SocketAddrUnix::new(folder.join("net.sock")).unwrap();
    let start = Instant::now();
    loop {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        if connect(&socket, &address).is_ok() {
            return Channel::from_fd(socket);
        }
        assert!(start.elapsed() < PATIENCE, "the engine does not listen");
        std::thread::yield_now();
    }
}

/// A guest: the other end of a frame socket, and a TCP stack.
pub struct Guest {
    link: GuestLink,
    interface: Interface,
    sockets: SocketSet<'static>,
    start: Instant,
    next_port: u16,
}

struct GuestLink {
    socket: OwnedFd,
    /// Packets that are not TCP.
    others: Vec<Vec<u8>>,
}

impl Guest {
    fn new(socket: OwnedFd) -> Self {
        rustix::io::ioctl_fionbio(&socket, true).unwrap();
        let mut link = GuestLink {
            socket,
            others: Vec::new(),
        };
        let mut interface =
            Interface::new(Config::new(HardwareAddress::Ip), &mut link, StackTime::ZERO);
        interface.update_ip_addrs(|all| all.push(IpCidr::new(wire::GUEST.into(), 0)).unwrap());
        Self {
            link,
            interface,
            sockets: SocketSet::new(Vec::new()),
            start: Instant::now(),
            next_port: 40000,
        }
    }

    /// This stack on the frame socket of another guest's sandbox.
    pub fn give_back(self, engine: &Engine, id: &str) -> Self {
        let allow = policy(Mode::Custom, &["allow host"]);
        let mut guest = self;
        guest.link.socket = engine.plug(id, &allow);
        rustix::io::ioctl_fionbio(&guest.link.socket, true).unwrap();
        guest
    }

    pub fn connect(&mut self, to: Ipv4Addr, port: u16) -> SocketHandle {
        let buffer = || SocketBuffer::new(vec![0; 256 * 1024]);
        let mut socket = Socket::new(buffer(), buffer());
        socket.set_ack_delay(None);
        self.next_port += 1;
        socket
            .connect(self.interface.context(), (to, port), self.next_port)
            .unwrap();
        let handle = self.sockets.add(socket);
        self.poll();
        handle
    }

    pub fn socket(&mut self, handle: SocketHandle) -> &mut Socket<'static> {
        self.sockets.get_mut(handle)
    }

    pub fn poll(&mut self) {
        let now = StackTime::from_micros(i64::try_from(self.start.elapsed().as_micros()).unwrap());
        self.interface.poll(now, &mut self.link, &mut self.sockets);
    }

    /// Lets the guest run until the condition holds.
    pub fn run_until(
        &mut self,
        handle: SocketHandle,
        mut done: impl FnMut(&mut Socket<'static>) -> bool,
    ) {
        let start = Instant::now();
        loop {
            self.poll();
            if done(self.sockets.get_mut(handle)) {
                self.poll();
                return;
            }
            let state = self.sockets.get::<Socket<'_>>(handle).state();
            assert!(
                start.elapsed() < PATIENCE,
                "nothing happens; the socket is {state}"
            );
            std::thread::yield_now();
        }
    }

    pub fn send_datagram(&mut self, to: Ipv4Addr, port: u16, payload: &[u8]) {
        // A frame of the engine with both directions exchanged.
        let mut frame = wire::datagram(wire::GATEWAY_MAC, to, 5000, port, payload).unwrap();
        frame[wire::VNET + 6..wire::VNET + 12].copy_from_slice(&MAC);
        let mut ip = Ipv4Packet::new_unchecked(&mut frame[wire::HEADERS..]);
        ip.set_src_addr(wire::GUEST);
        ip.set_dst_addr(to);
        while rustix::io::write(&self.link.socket, &frame) == Err(rustix::io::Errno::AGAIN) {
            self.poll();
        }
    }

    /// The next datagram for the guest; `None` if an ICMP error came.
    pub fn receive_datagram(&mut self) -> Option<(Ipv4Addr, u16, Vec<u8>)> {
        let start = Instant::now();
        while self.link.others.is_empty() {
            self.poll();
            assert!(start.elapsed() < PATIENCE, "no datagram comes");
            std::thread::yield_now();
        }
        let packet = self.link.others.remove(0);
        let ip = Ipv4Packet::new_checked(&packet).unwrap();
        let udp = UdpPacket::new_checked(ip.payload());
        match u8::from(ip.next_header()) {
            17 => {
                let udp = udp.unwrap();
                Some((ip.src_addr(), udp.src_port(), udp.payload().to_vec()))
            }
            1 => None,
            other => panic!("protocol {other}"),
        }
    }
}

struct Received(Vec<u8>);
struct Sending<'a>(&'a OwnedFd);

impl Device for GuestLink {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sending<'a>;

    fn receive(&mut self, _: StackTime) -> Option<(Received, Sending<'_>)> {
        let mut buffer = vec![0; wire::MAX_FRAME];
        loop {
            let len = rustix::io::read(&self.socket, &mut buffer).ok()?;
            let packet = buffer.get(wire::HEADERS..len)?.to_vec();
            if packet[9] == 6 {
                return Some((Received(packet), Sending(&self.socket)));
            }
            self.others.push(packet);
        }
    }

    fn transmit(&mut self, _: StackTime) -> Option<Sending<'_>> {
        Some(Sending(&self.socket))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = 1500;
        capabilities.checksum = ChecksumCapabilities::ignored();
        capabilities
    }
}

impl smoltcp::phy::RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

impl smoltcp::phy::TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut frame = wire::ipv4_frame(wire::GATEWAY_MAC, len);
        frame[wire::VNET + 6..wire::VNET + 12].copy_from_slice(&MAC);
        let result = f(&mut frame[wire::HEADERS..]);
        while rustix::io::write(self.0.as_fd(), &frame) == Err(rustix::io::Errno::AGAIN) {
            std::thread::yield_now();
        }
        result
    }
}
