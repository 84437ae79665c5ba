use super::*;
use crate::testing::Rig;
use forkd_vmm_proto::DeviceSlot;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
const MRG_RXBUF: u64 = 1 << 15;

fn pair() -> (OwnedFd, OwnedFd) {
    rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::NONBLOCK,
        None,
    )
    .unwrap()
}

fn rig_with(mask: u64, rate: RateLimit) -> (Rig, OwnedFd) {
    let (ours, theirs) = pair();
    let mut rig = Rig::new(DeviceSlot::Net);
    let net = Net::new(MAC, Some((ours, NetBackend::Socket)), rate).unwrap();
    rig.start_with(Box::new(net), mask);
    assert_eq!(rig.status(), 15);
    (rig, theirs)
}

fn rig() -> (Rig, OwnedFd) {
    rig_with(u64::MAX, RateLimit::default())
}

fn frame(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|n| (n as u8).wrapping_mul(7) ^ seed).collect()
}

/// Sends a frame after an empty header.
fn send(fd: &OwnedFd, frame: &[u8]) {
    let packet = [&[0; 12], frame].concat();
    rustix::net::send(fd, &packet, SendFlags::empty()).unwrap();
}

/// Receives a frame and drops its header.
fn receive(fd: &OwnedFd) -> Option<Vec<u8>> {
    let mut buffer = vec![0; 70_000];
    let (count, _) = rustix::net::recv(fd, &mut buffer, RecvFlags::empty()).ok()?;
    buffer.truncate(count);
    Some(buffer.split_off(12))
}

#[test]
fn the_address_is_shown() {
    let (rig, _peer) = rig();
    assert_eq!(rig.get(0x100).to_le_bytes(), MAC[..4]);
    assert_eq!(rig.get(0x104).to_le_bytes(), [MAC[4], MAC[5], 0, 0]);
}

#[test]
fn a_frame_from_the_guest_leaves_with_its_header() {
    let (mut rig, peer) = rig();
    let (header, data) = (frame(12, 9), frame(1514, 1));
    rig.add(1, &[&header, &data], &[]);
    rig.kick(1);
    assert_eq!(rig.used(1).map(|(_, len)| len), Some(0));
    let mut packet = vec![0; 2000];
    let (count, _) = rustix::net::recv(&peer, &mut packet, RecvFlags::empty()).unwrap();
    assert_eq!(packet[..count], [header, data].concat());
    assert_eq!(rig.counter("tx_bytes"), 1514);
}

#[test]
fn a_frame_for_the_guest_arrives_with_its_header() {
    let (mut rig, peer) = rig();
    let (_, rooms) = rig.add(0, &[], &[2048]);
    rig.kick(0);
    let data = frame(1000, 2);
    send(&peer, &data);
    rig.settle();
    assert_eq!(rig.used(0).map(|(_, len)| len), Some(1012));
    let packet = rig.read(rooms[0], 1012);
    assert_eq!(packet[..12], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
    assert_eq!(packet[12..], data);
}

#[test]
fn frames_wait_for_buffers_without_spinning() {
    let (mut rig, peer) = rig();
    send(&peer, &frame(100, 3));
    send(&peer, &frame(200, 4));
    rig.settle();
    assert_eq!(rig.event_loop.poll_once().unwrap(), 0);
    rig.add(0, &[], &[2048]);
    rig.kick(0);
    assert_eq!(rig.used(0).map(|(_, len)| len), Some(112));
    rig.add(0, &[], &[2048]);
    rig.kick(0);
    assert_eq!(rig.used(0).map(|(_, len)| len), Some(212));
}

#[test]
fn a_large_frame_is_spread_over_buffers_only_if_the_driver_can_merge() {
    let (mut rig, peer) = rig();
    let data = frame(2500, 5);
    let rooms: Vec<u64> = (0..4).map(|_| rig.add(0, &[], &[1000]).1[0]).collect();
    rig.kick(0);
    send(&peer, &data);
    rig.settle();
    let mut seen = Vec::new();
    for room in &rooms[..3] {
        let (_, len) = rig.used(0).unwrap();
        seen.extend(rig.read(*room, len as usize));
    }
    assert_eq!(rig.used(0), None);
    assert_eq!(seen[10..12], [3, 0]);
    assert_eq!(seen[12..], data);

    let (mut rig, peer) = rig_with(!MRG_RXBUF, RateLimit::default());
    for _ in 0..4 {
        rig.add(0, &[], &[1000]);
    }
    rig.kick(0);
    send(&peer, &data);
    send(&peer, &frame(500, 6));
    rig.settle();
    assert_eq!(rig.used(0).map(|(_, len)| len), Some(512));
    assert_eq!(rig.counter("rx_dropped"), 1);
}

#[test]
fn a_frame_that_lacks_a_part_of_its_room_asks_to_be_told_of_the_rest() {
    let (mut rig, peer) = rig();
    rig.add(0, &[], &[1000]);
    send(&peer, &frame(1500, 5));
    rig.kick(0);
    assert_eq!(rig.used(0), None);
    // Where the driver looks to see from which index on the device wants to be told.
    let (_, _, used) = crate::testing::ring_addresses(0);
    let wanted = rig.read(used + 4 + 8 * u64::from(crate::testing::QUEUE_SIZE), 2);
    assert_eq!(wanted, 1u16.to_le_bytes());
    rig.add(0, &[], &[1000]);
    rig.kick(0);
    assert!(rig.used(0).is_some() && rig.used(0).is_some());
}

#[test]
fn a_slow_peer_holds_frames_back_and_none_is_lost() {
    let (mut rig, peer) = rig();
    let mut sent = 0u32;
    let mut done = 0u32;
    let data = frame(9000, 8);
    while done == sent {
        rig.add(1, &[&[0; 12], &data], &[]);
        sent += 1;
        rig.kick(1);
        while rig.used(1).is_some() {
            done += 1;
        }
    }
    assert_eq!(rig.event_loop.poll_once().unwrap(), 0);
    let mut received = 0;
    while done < sent {
        while receive(&peer).is_some() {
            received += 1;
        }
        rig.settle();
        while rig.used(1).is_some() {
            done += 1;
        }
    }
    while receive(&peer).is_some() {
        received += 1;
    }
    assert_eq!(received, sent);
}

#[test]
fn a_peer_that_is_gone_costs_frames_and_nothing_else() {
    let (mut rig, peer) = rig();
    drop(peer);
    rig.settle();
    assert_eq!(rig.event_loop.poll_once().unwrap(), 0);
    rig.add(1, &[&[0; 12], &frame(100, 1)], &[]);
    rig.kick(1);
    assert!(rig.used(1).is_some());
    assert_eq!(rig.counter("tx_dropped"), 1);
    assert!(!rig.needs_reset());
}

#[test]
fn both_directions_keep_to_the_rate() {
    let rate = RateLimit {
        ops_per_second: 1,
        burst_ops: 1,
        ..RateLimit::default()
    };
    let (mut rig, peer) = rig_with(u64::MAX, rate);
    for _ in 0..3 {
        rig.add(0, &[], &[2048]);
        rig.add(1, &[&[0; 12], &frame(60, 1)], &[]);
        send(&peer, &frame(60, 2));
    }
    rig.kick(0);
    rig.kick(1);
    assert!(rig.used(0).is_some() && rig.used(0).is_none());
    assert!(rig.used(1).is_some() && rig.used(1).is_none());
    assert_eq!(rig.event_loop.poll_once().unwrap(), 0);
    assert!(rig.counter("rx_throttled") > 0 && rig.counter("tx_throttled") > 0);
}

#[test]
fn frames_that_are_none_stop_the_device_or_are_dropped() {
    let (mut rig, peer) = rig();
    rig.add(1, &[&[0; 12]], &[]);
    let chunk = [0; 60_000];
    rig.add(1, &[&[0; 12], &chunk, &chunk], &[]);
    rig.kick(1);
    assert_eq!(rig.counter("tx_dropped"), 2);
    assert!(receive(&peer).is_none());
    rig.add(1, &[&[0; 11]], &[]);
    rig.kick(1);
    assert!(rig.needs_reset());

    let (mut rig, peer) = super::tests::rig();
    rig.add(0, &[], &[4]);
    rig.kick(0);
    send(&peer, &frame(60, 1));
    rig.settle();
    assert!(rig.needs_reset());
}

#[test]
fn a_restored_device_goes_on_with_its_new_back_end() {
    let (mut rig, _old_peer) = rig();
    rig.add(0, &[], &[2048]);
    rig.add(1, &[&[0; 12], &frame(64, 9)], &[]);
    let (ours, peer) = pair();
    let other = [2, 0, 0, 0, 0, 99];
    let backend = Some((ours, NetBackend::Socket));
    let net = Net::new(other, backend, RateLimit::default()).unwrap();
    let mut child = rig.restore_into(Box::new(net)).unwrap();
    send(&peer, &frame(77, 1));
    child.settle();
    assert_eq!(receive(&peer).unwrap(), frame(64, 9));
    assert_eq!(child.used(0).map(|(_, len)| len), Some(89));
    // The driver has read the address already, so it stays that of the state.
    assert_eq!(child.get(0x100).to_le_bytes(), MAC[..4]);
    assert_eq!(child.get(0x104).to_le_bytes(), [MAC[4], MAC[5], 0, 0]);
}

fn set_backend(rig: &Rig, backend: Option<(OwnedFd, NetBackend)>) {
    let set = rig.transport.with(|net: &mut Net| net.set_backend(backend));
    set.unwrap().unwrap();
}

#[test]
fn every_back_end_offers_the_guest_the_same() {
    let features = |backend| {
        Net::new(MAC, backend, RateLimit::default())
            .unwrap()
            .features()
    };
    let (ours, _peer) = pair();
    let (tap, _other) = pair();
    let without = features(None);
    assert_eq!(features(Some((ours, NetBackend::Socket))), without);
    assert_eq!(features(Some((tap, NetBackend::Tap))), without);
}

#[test]
fn without_a_back_end_frames_of_the_guest_are_dropped() {
    let mut rig = Rig::new(DeviceSlot::Net);
    let net = Net::new(MAC, None, RateLimit::default()).unwrap();
    rig.start_with(Box::new(net), u64::MAX);
    rig.add(0, &[], &[2048]);
    rig.add(1, &[&[0; 12], &frame(100, 1)], &[]);
    rig.kick(0);
    rig.kick(1);
    assert!(rig.used(1).is_some() && rig.used(0).is_none());
    assert_eq!(rig.counter("tx_dropped"), 1);
    assert!(!rig.needs_reset());
    assert_eq!(rig.event_loop.poll_once().unwrap(), 0);
}

#[test]
fn the_back_end_of_a_running_device_can_be_exchanged() {
    let (mut rig, old) = rig();
    // A frame of the old network that the guest has no room for.
    send(&old, &frame(100, 3));
    rig.settle();
    let (ours, peer) = pair();
    set_backend(&rig, Some((ours, NetBackend::Socket)));
    assert_eq!(rustix::io::read(&old, &mut [0; 8]), Ok(0));
    rig.add(1, &[&[0; 12], &frame(60, 4)], &[]);
    rig.kick(1);
    assert_eq!(receive(&peer).unwrap(), frame(60, 4));
    rig.add(0, &[], &[2048]);
    rig.kick(0);
    send(&peer, &frame(77, 5));
    rig.settle();
    assert_eq!(rig.used(0).map(|(_, len)| len), Some(89));
    set_backend(&rig, None);
    rig.add(1, &[&[0; 12], &frame(60, 4)], &[]);
    rig.kick(1);
    assert_eq!(rig.counter("tx_dropped"), 1);
    assert_eq!(rustix::io::read(&peer, &mut [0; 8]), Ok(0));
}

#[test]
fn frames_that_waited_for_a_full_back_end_go_to_the_next() {
    let (mut rig, _full) = rig();
    let data = frame(9000, 8);
    let mut waiting = false;
    while !waiting {
        rig.add(1, &[&[0; 12], &data], &[]);
        rig.kick(1);
        waiting = rig.used(1).is_none();
    }
    let (ours, peer) = pair();
    set_backend(&rig, Some((ours, NetBackend::Socket)));
    rig.settle();
    assert!(rig.used(1).is_some());
    assert_eq!(receive(&peer).unwrap(), data);
}

#[test]
fn a_state_with_a_group_address_is_refused() {
    let mut net = Net::new(MAC, None, RateLimit::default()).unwrap();
    let DeviceState::Net(NetState::V1 {
        rx_rate, tx_rate, ..
    }) = net.save()
    else {
        panic!("the state of another device");
    };
    let mac = [0xff; 6];
    let state = DeviceState::Net(NetState::V1 {
        mac,
        rx_rate,
        tx_rate,
    });
    assert!(net.restore(state).is_err());
}
