//! Bad links and bad peers: loss, tiny windows, resets at any point, peers that do not read, a host without ports.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Instant;

use forkd_net::wire;
use forkd_net_proto::Reason;
use forkd_types::Mode;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_linger;
use smoltcp::socket::tcp::State;

use super::rig::{Engine, Guest, policy};
use super::world::{DEAF, ECHO, GUSH, PUBLIC, World, ip};
use super::{LOOPBACK, echo_server, ping};

/// One frame in so many is lost, one is sent twice, and one is overtaken by the next.
const BAD: u32 = 100;
/// The seed of the faults.
const SEED: u64 = 13;

/// A link that carries frames both ways until it is dropped.
struct BadLink {
    ends: Arc<AtomicBool>,
    faults: Arc<AtomicU32>,
}

impl BadLink {
    fn between(one: OwnedFd, other: OwnedFd) -> Self {
        let link = Self {
            ends: Arc::default(),
            faults: Arc::default(),
        };
        let (one, other) = (Arc::new(one), Arc::new(other));
        for (from, to, seed) in [
            (Arc::clone(&one), Arc::clone(&other), SEED),
            (other, one, SEED + 1),
        ] {
            let (ends, faults) = (Arc::clone(&link.ends), Arc::clone(&link.faults));
            thread::spawn(move || carry(&from, &to, SmallRng::seed_from_u64(seed), &ends, &faults));
        }
        link
    }
}

impl Drop for BadLink {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
    }
}

fn carry(from: &OwnedFd, to: &OwnedFd, mut dice: SmallRng, ends: &AtomicBool, faults: &AtomicU32) {
    let mut frame = vec![0; wire::MAX_FRAME];
    let mut overtaken: Option<Vec<u8>> = None;
    while !ends.load(Ordering::Relaxed) {
        let len = match rustix::io::read(from, &mut frame) {
            Ok(0) => return,
            Ok(len) => len,
            Err(_) => {
                wait(from, PollFlags::IN);
                // Nothing overtakes the last frame.
                if let Some(frame) = overtaken.take() {
                    put(to, &frame);
                }
                continue;
            }
        };
        let fault = dice.random_range(0..BAD);
        faults.fetch_add(u32::from(fault < 3), Ordering::Relaxed);
        match fault {
            0 => continue,
            1 => put(to, &frame[..len]),
            2 if overtaken.is_none() => {
                overtaken = Some(frame[..len].to_vec());
                continue;
            }
            _ => {}
        }
        put(to, &frame[..len]);
        if let Some(frame) = overtaken.take() {
            put(to, &frame);
        }
    }
}

fn put(to: &OwnedFd, frame: &[u8]) {
    while let Err(Errno::AGAIN | Errno::NOBUFS) = rustix::io::write(to, frame) {
        wait(to, PollFlags::OUT);
    }
}

fn wait(descriptor: &OwnedFd, events: PollFlags) {
    let mut one = [PollFd::from_borrowed_fd(descriptor.as_fd(), events)];
    let limit = Timespec {
        tv_sec: 0,
        tv_nsec: 100_000_000,
    };
    let _ = poll(&mut one, Some(&limit));
}

/// Bytes that do not repeat soon.
fn pattern(len: usize) -> Vec<u8> {
    let mut dice = SmallRng::seed_from_u64(SEED);
    (0..len).map(|_| dice.random()).collect()
}

/// The guest is a kernel behind a tap device. Its connections carry all bytes over a link that loses, doubles and
/// reorders frames, in both directions at once.
#[test]
fn a_kernel_behind_a_bad_link_loses_no_byte() {
    let Some(world) = World::make() else { return };
    let engine = world.start();
    let frames = engine.plug("sb-1", &policy(Mode::Public, &[]));
    rustix::io::ioctl_fionbio(&frames, true).unwrap();
    let guest = world.guest();
    ip(&format!("netns add {guest}"));
    let Ok(tap) = world.within(&guest, || forkd_sys::open_tap("tap0")) else {
        eprintln!("no tap device: nothing was tested");
        return;
    };
    ip(&format!("-n {guest} address add 10.42.0.2/24 dev tap0"));
    ip(&format!("-n {guest} link set tap0 up"));
    ip(&format!("-n {guest} route add default via 10.42.0.1"));
    let link = BadLink::between(tap, frames);
    let sent = pattern(4 << 20);
    let got = world.within(&guest, || {
        let mut stream = TcpStream::connect((PUBLIC, ECHO)).unwrap();
        let mut reader = stream.try_clone().unwrap();
        let reading = thread::spawn(move || {
            let mut got = Vec::new();
            reader.read_to_end(&mut got).map(|_| got)
        });
        stream.write_all(&sent).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        reading.join().unwrap().unwrap()
    });
    assert!(
        got == sent,
        "{} of {} bytes came back",
        got.len(),
        sent.len()
    );
    let faults = link.faults.load(Ordering::Relaxed);
    assert!(faults > 20, "the link had {faults} faults only");
}

#[test]
fn tiny_windows_carry_every_byte() {
    let engine = Engine::start(&[]);
    let mut guest = engine.attach("sb-1", &policy(Mode::Custom, &["allow host"]));
    let port = echo_server();
    for (room, len) in [(1, 300), (7, 3_000), (536, 100_000)] {
        let sent = pattern(len);
        let socket = guest.connect_with(LOOPBACK, port, room);
        guest.run_until(socket, |tcp| tcp.may_send());
        let (mut written, mut got) = (0, Vec::new());
        guest.run_until(socket, |tcp| {
            written += tcp.send_slice(&sent[written..]).unwrap_or(0);
            while tcp.can_recv() {
                tcp.recv(|bytes| (bytes.len(), got.extend_from_slice(bytes)))
                    .unwrap();
            }
            got.len() >= sent.len()
        });
        assert!(got == sent, "the bytes differ with room for {room}");
        guest.socket(socket).abort();
        guest.poll();
    }
}

/// Whose side of a connection breaks it, and after how many bytes.
#[derive(Debug, Clone, Copy)]
enum Breaks {
    Guest(usize),
    Server(usize),
    /// The guest ended its direction before the server breaks the connection.
    ServerAfterTheEnd(usize),
}

/// A server that sends so many bytes to each client, and then waits until the guest has them.
fn sending_server(len: usize) -> (u16, thread::JoinHandle<TcpStream>) {
    let listener = TcpListener::bind((LOOPBACK, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let accepted = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(&pattern(len)).unwrap();
        stream
    });
    (port, accepted)
}

#[test]
fn a_reset_at_any_point_reaches_the_other_side() {
    let engine = Engine::start(&[]);
    let mut guest = engine.attach("sb-1", &policy(Mode::Custom, &["allow host"]));
    for len in [0, 1, 1_459, 1_460, 70_000, 200_000] {
        for breaks in [
            Breaks::Guest(len),
            Breaks::Server(len),
            Breaks::ServerAfterTheEnd(len),
        ] {
            one_reset(&mut guest, breaks);
            let start = Instant::now();
            while engine.stats("sb-1").open > 0 {
                assert!(start.elapsed().as_secs() < 60, "{breaks:?}: a flow is left");
            }
        }
    }
}

fn one_reset(guest: &mut Guest, breaks: Breaks) {
    let (Breaks::Guest(len) | Breaks::Server(len) | Breaks::ServerAfterTheEnd(len)) = breaks;
    let (port, accepted) = sending_server(len);
    let socket = guest.connect(LOOPBACK, port);
    guest.run_until(socket, |tcp| tcp.recv_queue() >= len && tcp.may_send());
    let mut server = accepted.join().unwrap();
    match breaks {
        Breaks::Guest(_) => {
            guest.socket(socket).abort();
            guest.poll();
            let error = server.read(&mut [0]).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(Errno::CONNRESET.raw_os_error()));
            return;
        }
        Breaks::Server(_) => {}
        Breaks::ServerAfterTheEnd(_) => {
            guest.socket(socket).close();
            guest.poll();
            assert_eq!(server.read(&mut [0]).unwrap(), 0, "{breaks:?}");
        }
    }
    set_socket_linger(&server, Some(std::time::Duration::ZERO)).unwrap();
    drop(server);
    guest.run_until(socket, |tcp| tcp.state() == State::Closed);
}

/// Guests that do not read, and servers that do not: the engine holds at most its buffers, and others go on.
#[test]
fn peers_that_do_not_read_take_bounded_memory() {
    const FLOWS: usize = 64;
    let Some(world) = World::make() else { return };
    let engine = world.start();
    let mut quiet = engine.attach("sb-1", &policy(Mode::Public, &[]));
    let socket = quiet.connect(PUBLIC, ECHO);
    quiet.run_until(socket, |tcp| tcp.may_send());
    ping(&mut quiet, socket);
    let before = engine.resident();
    let mut guest = engine.attach("sb-2", &policy(Mode::Public, &[]));
    let mut filling = Vec::new();
    for _ in 0..FLOWS {
        let gushes = guest.connect(PUBLIC, GUSH);
        guest.run_until(gushes, |tcp| tcp.recv_queue() == tcp.recv_capacity());
        let deaf = guest.connect(PUBLIC, DEAF);
        guest.run_until(deaf, |tcp| tcp.may_send());
        filling.push(deaf);
    }
    // The servers take no more when a round moves nothing.
    let mut sent = u64::MAX;
    while engine.stats("sb-2").counters.bytes_up != sent {
        sent = engine.stats("sb-2").counters.bytes_up;
        for deaf in &filling {
            let _ = guest.socket(*deaf).send_slice(&[7; 256 * 1024]);
        }
        for _ in 0..200 {
            guest.poll();
            thread::yield_now();
        }
        ping(&mut quiet, socket);
    }
    assert_eq!(engine.stats("sb-2").open as usize, 2 * FLOWS);
    let grown = engine.resident().saturating_sub(before);
    assert!(grown < 48 * 1024, "the engine has grown by {grown} KiB");
}

/// Connects once and says why it failed.
fn verdict(engine: &Engine, guest: &mut Guest) -> Result<smoltcp::iface::SocketHandle, Reason> {
    let socket = guest.connect(PUBLIC, ECHO);
    guest.run_until(socket, |tcp| tcp.may_send() || tcp.state() == State::Closed);
    match guest.socket(socket).may_send() {
        true => Ok(socket),
        false => Err(engine.log("sb-1").pop().unwrap().reason),
    }
}

#[test]
fn a_host_without_ports_or_routes_refuses_and_recovers() {
    let Some(world) = World::make() else { return };
    let engine = world.start();
    let mut guest = engine.attach("sb-1", &policy(Mode::Public, &[]));
    world.within(&world.engine(), || {
        let mut file = File::create("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
        file.write_all(b"50000 50003").unwrap();
    });
    let mut open = Vec::new();
    let refused = loop {
        match verdict(&engine, &mut guest) {
            Ok(socket) => open.push(socket),
            Err(reason) => break reason,
        }
        assert!(open.len() <= 4, "more connections than ports");
    };
    assert_eq!(refused, Reason::Unreachable);
    ping(&mut guest, open[0]);
    for socket in open {
        guest.socket(socket).abort();
    }
    guest.poll();
    let start = Instant::now();
    while verdict(&engine, &mut guest).is_err() {
        assert!(start.elapsed().as_secs() < 60, "no port is free again");
    }
    ip(&format!("-n {} route del default", world.engine()));
    assert_eq!(
        verdict(&engine, &mut guest).err(),
        Some(Reason::Unreachable)
    );
    ip(&format!(
        "-n {} route add default via 192.0.2.2",
        world.engine()
    ));
    let socket = verdict(&engine, &mut guest).unwrap();
    ping(&mut guest, socket);
}
