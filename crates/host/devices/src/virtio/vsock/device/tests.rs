use super::*;
use crate::testing::{QUEUE_SIZE, Rig};
use crate::virtio::vsock::connection::BUF_ALLOC;
use crate::virtio::vsock::muxer::MAX_CONNECTIONS;
use crate::virtio::vsock::packet::{
    HEADER_LEN, HOST_CID, Header, Op, SHUT_BOTH, SHUT_RECEIVE, SHUT_SEND, TYPE_STREAM,
};
use forkd_vmm_proto::{DeviceSlot, READY_PORT};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const CID: u32 = 5;
const ROOM: usize = 4096;
const WINDOW: u32 = 64 * 1024;

/// A guest that speaks for itself: no kernel, only packets.
struct Guest {
    rig: Rig,
    path: std::path::PathBuf,
    _dir: tempfile::TempDir,
    rooms: HashMap<u16, u64>,
}

fn device(path: &std::path::Path, rig: &Rig) -> Box<Vsock> {
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path).unwrap();
    Box::new(Vsock::new(CID, listener.into(), rig.events.clone()).unwrap())
}

impl Guest {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v.sock");
        let mut rig = Rig::new(DeviceSlot::Vsock);
        let device = device(&path, &rig);
        rig.start(device);
        assert_eq!(rig.status(), 15);
        Self {
            rig,
            path,
            _dir: dir,
            rooms: HashMap::new(),
        }
    }

    fn post(&mut self, count: u16) {
        for _ in 0..count {
            let (head, rooms) = self.rig.add(0, &[], &[ROOM]);
            self.rooms.insert(head, rooms[0]);
        }
        self.rig.pin();
        self.rig.kick(0);
    }

    /// All packets that have come, leaving new rooms for as many.
    fn receive(&mut self) -> Vec<(Header, Vec<u8>)> {
        self.rig.settle();
        let mut packets = Vec::new();
        while let Some((head, len)) = self.rig.used(0) {
            let room = self.rooms[&u16::try_from(head).unwrap()];
            let bytes = self.rig.read(room, len as usize);
            let header = Header::decode(bytes[..HEADER_LEN].try_into().unwrap());
            assert_eq!(header.len as usize, bytes.len() - HEADER_LEN);
            assert_eq!((header.src_cid, header.dst_cid), (HOST_CID, u64::from(CID)));
            packets.push((header, bytes[HEADER_LEN..].to_vec()));
            let head = self.rig.add_at(0, &[], &[(room, ROOM)]);
            self.rooms.insert(head, room);
        }
        self.rig.kick(0);
        packets
    }

    fn one(&mut self) -> (Header, Vec<u8>) {
        let mut packets = self.receive();
        assert_eq!(packets.len(), 1, "{packets:?}");
        packets.remove(0)
    }

    /// Sends a packet; returns how many packets the device has taken.
    fn send(
        &mut self,
        from: u32,
        to: u32,
        op: Op,
        change: impl FnOnce(&mut Header),
        data: &[u8],
    ) -> usize {
        let mut header = Header {
            src_cid: u64::from(CID),
            dst_cid: HOST_CID,
            src_port: from,
            dst_port: to,
            len: data.len() as u32,
            kind: TYPE_STREAM,
            op,
            flags: 0,
            buf_alloc: WINDOW,
            fwd_cnt: 0,
        };
        change(&mut header);
        let header = header.encode();
        let parts: &[&[u8]] = if data.is_empty() {
            &[&header]
        } else {
            &[&header, data]
        };
        self.rig.add(1, parts, &[]);
        self.rig.kick(1);
        std::iter::from_fn(|| self.rig.used(1)).count()
    }

    /// A client that has asked for a port, and the guest has agreed.
    fn connected(&mut self, port: u32) -> (UnixStream, u32) {
        let mut client = UnixStream::connect(&self.path).unwrap();
        client
            .write_all(format!("CONNECT {port}\n").as_bytes())
            .unwrap();
        let (request, _) = self.one();
        assert_eq!((request.op, request.dst_port), (Op::Request, port));
        self.send(port, request.src_port, Op::Response, |_| {}, &[]);
        let mut line = vec![0; format!("OK {}\n", request.src_port).len()];
        client.read_exact(&mut line).unwrap();
        assert_eq!(line, format!("OK {}\n", request.src_port).into_bytes());
        client.set_nonblocking(true).unwrap();
        (client, request.src_port)
    }
}

fn ready_guest() -> Guest {
    let mut guest = Guest::new();
    guest.post(QUEUE_SIZE / 2);
    guest
}

#[test]
fn bytes_go_both_ways_and_a_close_is_seen() {
    let mut guest = ready_guest();
    let (mut client, host) = guest.connected(1024);
    client.write_all(b"from host").unwrap();
    let (header, data) = guest.one();
    assert_eq!((header.op, header.buf_alloc), (Op::Data, BUF_ALLOC));
    assert_eq!(data, b"from host");
    guest.send(1024, host, Op::Data, |_| {}, b"from guest");
    let mut seen = [0; 10];
    client.read_exact(&mut seen).unwrap();
    assert_eq!(&seen, b"from guest");
    drop(client);
    let (header, _) = guest.one();
    assert_eq!((header.op, header.flags), (Op::Shutdown, SHUT_BOTH));
    guest.send(1024, host, Op::Reset, |_| {}, &[]);
    assert!(guest.receive().is_empty());
    assert_eq!(guest.rig.counter("open"), 0);
}

#[test]
fn a_refused_port_ends_the_client() {
    let mut guest = ready_guest();
    let mut client = UnixStream::connect(&guest.path).unwrap();
    client.write_all(b"CONNECT 9\n").unwrap();
    let (request, _) = guest.one();
    guest.send(9, request.src_port, Op::Reset, |_| {}, &[]);
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
}

#[test]
fn a_client_that_comes_before_the_driver_is_answered_when_the_driver_comes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("v.sock");
    let mut rig = Rig::new(DeviceSlot::Vsock);
    let vsock = device(&path, &rig);
    let mut early = UnixStream::connect(&path).unwrap();
    early.write_all(b"CONNECT 7\n").unwrap();
    rig.start(vsock);
    let mut guest = Guest {
        rig,
        path,
        _dir: dir,
        rooms: HashMap::new(),
    };
    guest.post(4);
    assert_eq!(guest.one().0.op, Op::Request);
}

#[test]
fn half_closes_are_told_and_kept() {
    let mut guest = ready_guest();
    let (mut client, host) = guest.connected(1);
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let (header, _) = guest.one();
    assert_eq!((header.op, header.flags), (Op::Shutdown, SHUT_SEND));
    guest.send(1, host, Op::Data, |_| {}, b"still here");
    let mut seen = [0; 10];
    client.read_exact(&mut seen).unwrap();
    guest.send(1, host, Op::Shutdown, |h| h.flags = SHUT_SEND, &[]);
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());

    let (header, _) = guest.one();
    assert_eq!((header.op, header.flags), (Op::Shutdown, SHUT_BOTH));

    let (mut client, host) = guest.connected(2);
    guest.send(2, host, Op::Shutdown, |h| h.flags = SHUT_RECEIVE, &[]);
    client.write_all(b"this is not read").unwrap();
    assert!(guest.receive().is_empty());
    guest.send(2, host, Op::Shutdown, |h| h.flags = SHUT_BOTH, &[]);
    assert_eq!(guest.one().0.op, Op::Reset);
}

#[test]
fn what_a_closing_guest_sent_reaches_a_slow_client() {
    let mut guest = ready_guest();
    let (mut client, host) = guest.connected(1);
    let data: Vec<u8> = (0..100_000u32).map(|n| (n % 253) as u8).collect();
    let mut sent = 0;
    // As much as the socket and the credit take.
    while sent < 2 {
        for chunk in data.chunks(50_000) {
            guest.send(1, host, Op::Data, |_| {}, chunk);
        }
        sent += 1;
    }
    guest.send(1, host, Op::Shutdown, |h| h.flags = SHUT_BOTH, &[]);
    let ops: Vec<Op> = guest.receive().iter().map(|(h, _)| h.op).collect();
    assert_eq!(*ops.last().unwrap(), Op::Reset);
    let mut seen = Vec::new();
    let mut chunk = [0; 8192];
    loop {
        match client.read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => seen.extend_from_slice(&chunk[..count]),
            Err(_) => guest.rig.settle(),
        }
    }
    assert!(seen == [data.clone(), data].concat());
    assert_eq!(guest.rig.counter("open"), 0);
}

#[test]
fn the_guests_window_is_kept() {
    let mut guest = ready_guest();
    let (mut client, host) = guest.connected(1);
    let data: Vec<u8> = (0..300_000u32).map(|n| (n % 251) as u8).collect();
    let mut written = 0;
    let mut seen = Vec::new();
    let mut told = 0u32;
    while seen.len() < data.len() {
        while let Ok(count) = client.write(&data[written..]) {
            written += count;
            if count == 0 {
                break;
            }
        }
        let packets = guest.receive();
        let progress = !packets.is_empty();
        for (header, bytes) in packets {
            match header.op {
                Op::Data => seen.extend(bytes),
                Op::CreditRequest => {}
                op => panic!("{op:?}"),
            }
        }
        assert!(seen.len() - told as usize <= WINDOW as usize);
        if !progress {
            assert_eq!(seen.len() - told as usize, WINDOW as usize);
            told = seen.len() as u32;
            guest.send(1, host, Op::CreditUpdate, |h| h.fwd_cnt = told, &[]);
        }
    }
    assert!(seen == data);
}

#[test]
fn a_guest_that_sends_over_its_credit_is_reset() {
    let mut guest = ready_guest();
    let (_client, host) = guest.connected(1);
    let chunk = [0; 60_000];
    let mut reset = false;
    for _ in 0..100 {
        guest.send(1, host, Op::Data, |_| {}, &chunk);
        reset |= guest.receive().iter().any(|(h, _)| h.op == Op::Reset);
    }
    assert!(reset);
    assert!(!guest.rig.needs_reset());
}

#[test]
fn credit_comes_back_as_the_client_reads() {
    let mut guest = ready_guest();
    let (mut client, host) = guest.connected(1);
    let mut sent = 0u32;
    let mut forwarded = 0u32;
    let mut read = 0usize;
    let mut buffer = vec![0; 65536];
    for _ in 0..400 {
        let free = BUF_ALLOC - sent.wrapping_sub(forwarded);
        let chunk = vec![7; free.min(16384) as usize];
        if !chunk.is_empty() {
            guest.send(1, host, Op::Data, |_| {}, &chunk);
            sent += chunk.len() as u32;
        }
        if let Ok(count) = client.read(&mut buffer) {
            read += count;
        }
        for (header, _) in guest.receive() {
            assert_eq!(header.op, Op::CreditUpdate);
            forwarded = header.fwd_cnt;
        }
    }
    while let Ok(count) = client.read(&mut buffer) {
        read += count;
        guest.rig.settle();
    }
    assert_eq!(read, sent as usize);
    assert!(read > 4 * BUF_ALLOC as usize, "{read}");
}

#[test]
fn the_ready_port_is_an_announcement() {
    let mut guest = ready_guest();
    guest.send(5000, READY_PORT, Op::Request, |_| {}, &[]);
    let ops: Vec<(Op, u32)> = guest
        .receive()
        .iter()
        .map(|(h, _)| (h.op, h.flags))
        .collect();
    assert_eq!(ops, [(Op::Response, 0), (Op::Shutdown, SHUT_BOTH)]);
    assert_eq!(guest.rig.events.get().ready, 1);
    guest.send(5000, READY_PORT, Op::Reset, |_| {}, &[]);
    guest.send(5001, READY_PORT, Op::Request, |_| {}, &[]);
    assert_eq!(guest.rig.events.get().ready, 1);
}

#[test]
fn a_stream_the_guest_opens_is_handed_out() {
    let mut guest = ready_guest();
    guest.send(6000, 77, Op::Request, |_| {}, &[]);
    assert_eq!(guest.one().0.op, Op::Response);
    let (port, stream) = guest.rig.events.get().streams.remove(0);
    assert_eq!(port, 77);
    let mut stream = UnixStream::from(stream);
    guest.send(6000, 77, Op::Data, |_| {}, b"ping");
    let mut seen = [0; 4];
    stream.read_exact(&mut seen).unwrap();
    stream.write_all(b"pong").unwrap();
    assert_eq!(guest.one().1, b"pong");
}

#[test]
fn packets_that_belong_nowhere_are_answered_with_a_reset() {
    let mut guest = ready_guest();
    guest.send(1, 2, Op::Data, |_| {}, b"lost");
    assert_eq!(guest.one().0.op, Op::Reset);
    guest.send(1, 2, Op::Request, |h| h.kind = 2, &[]);
    assert_eq!(guest.one().0.op, Op::Reset);
    guest.send(1, 2, Op::Request, |h| h.src_cid = 99, &[]);
    assert_eq!(guest.one().0.op, Op::Reset);
    guest.send(1, 2, Op::Request, |h| h.dst_cid = 99, &[]);
    guest.send(1, 2, Op::Reset, |_| {}, &[]);
    assert!(guest.receive().is_empty());
    assert!(!guest.rig.needs_reset());
}

#[test]
fn a_packet_shorter_than_it_says_stops_the_device_and_its_clients() {
    let mut guest = ready_guest();
    let (mut client, host) = guest.connected(1);
    guest.send(1, host, Op::Data, |h| h.len = 100, b"short");
    assert!(guest.rig.needs_reset());
    client.set_nonblocking(false).unwrap();
    assert_eq!(client.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn a_guest_that_takes_nothing_does_not_grow_the_host() {
    let mut guest = Guest::new();
    let mut waiting = 0;
    let mut sent = 0u32;
    while waiting < 40 {
        waiting = waiting + 1 - guest.send(sent, 2, Op::Data, |_| {}, &[]);
        sent += 1;
    }
    assert_eq!(guest.rig.counter("bad_packets"), 1024);
    // Once it takes packets the rest is looked at.
    guest.post(16);
    let mut seen = 0;
    while seen < sent as usize {
        let packets = guest.receive();
        assert!(!packets.is_empty());
        assert!(packets.iter().all(|(h, _)| h.op == Op::Reset));
        seen += packets.len();
    }
    assert_eq!(guest.rig.counter("bad_packets"), u64::from(sent));
}

#[test]
fn a_restored_guest_is_told_of_every_old_connection_before_any_new_one() {
    let mut guest = ready_guest();
    let (_first, host_first) = guest.connected(1024);
    let (_second, host_second) = guest.connected(1025);
    guest.send(6000, 77, Op::Request, |_| {}, &[]);
    assert_eq!(guest.one().0.op, Op::Response);

    let path = guest.path.with_file_name("child.sock");
    let vsock = device(&path, &guest.rig);
    let mut waiting = UnixStream::connect(&path).unwrap();
    waiting.write_all(b"CONNECT 1024\n").unwrap();
    let rig = guest.rig.restore_into(vsock).unwrap();
    let mut child = Guest {
        rig,
        path,
        rooms: guest.rooms.clone(),
        _dir: tempfile::tempdir().unwrap(),
    };
    let packets = child.receive();
    let ops: Vec<Op> = packets.iter().map(|(h, _)| h.op).collect();
    assert_eq!(ops, [Op::Reset, Op::Reset, Op::Reset, Op::Request]);
    let mut ports: Vec<(u32, u32)> = packets[..3]
        .iter()
        .map(|(h, _)| (h.src_port, h.dst_port))
        .collect();
    ports.sort_unstable();
    assert_eq!(ports, [(77, 6000), (host_first, 1024), (host_second, 1025)]);
    assert!(packets[3].0.src_port > host_second);
}

#[test]
fn rubbish_state_is_refused() {
    let guest = ready_guest();
    let Some(crate::virtio::SlotState::V1(good)) = guest.rig.transport.save() else {
        panic!("no state");
    };
    for (cid, count) in [(0, 0), (2, 0), (u64::MAX, 0), (5, 100_000)] {
        let mut state = good.clone();
        state.device = DeviceState::Vsock(VsockState::V1 {
            cid,
            next_port: 0,
            connections: vec![(1, 1); count],
        });
        let path = guest.path.with_file_name("other.sock");
        let vsock = device(&path, &guest.rig);
        let state = crate::virtio::SlotState::V1(state);
        assert!(guest.rig.restore_state_into(vsock, state).is_err());
    }
}

#[test]
fn silent_clients_make_room_for_others() {
    let mut guest = ready_guest();
    let mut silent = Vec::new();
    for _ in 0..(MAX_CONNECTIONS + 20) {
        silent.push(UnixStream::connect(&guest.path).unwrap());
        guest.rig.settle();
    }
    let (_client, _) = guest.connected(5);
    assert!(guest.rig.counter("bad_clients") >= 20);
}

#[test]
fn an_accept_that_fails_is_tried_again() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("v.sock");
    // A socket that does not listen yet: accepting fails with another error than "no client waits".
    let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    let mut rig = Rig::new(DeviceSlot::Vsock);
    let theirs = listener.try_clone().unwrap();
    let device = Vsock::new(CID, theirs, rig.events.clone()).unwrap();
    rig.start(Box::new(device));
    while rig.counter("refused") == 0 {
        rig.settle();
    }
    listen(&listener, 8).unwrap();
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"CONNECT 52\n").unwrap();
    let limit = Instant::now() + Duration::from_secs(60);
    while rig.counter("host_connections") == 0 {
        assert!(Instant::now() < limit, "the listener was given up");
        rig.settle();
        std::thread::yield_now();
    }
}

#[test]
fn clients_that_come_and_go_leave_state_that_can_be_restored() {
    let guest = Guest::new();
    // The guest takes nothing.
    for _ in 0..3000 {
        let mut client = UnixStream::connect(&guest.path).unwrap();
        client.write_all(b"CONNECT 52\n").unwrap();
        guest.rig.settle();
        drop(client);
        guest.rig.settle();
    }
    assert!(guest.rig.counter("refused") > 0);
    let path = guest.path.with_extension("child");
    let child = device(&path, &guest.rig);
    guest.rig.restore_into(child).unwrap();
}
