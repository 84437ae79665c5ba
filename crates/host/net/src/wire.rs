//! Frames between a VMM and the engine: a virtio header of 12 bytes, an Ethernet header, an ARP or IPv4 packet.
//!
//! The guest is hostile: [`parse`] returns `None` for every frame that the engine does not serve. Checksums of the guest
//! are not checked, since the frame never left the host. Frames for the guest have the checksum of their pseudo header
//! only, and the virtio header asks the guest to complete it.

use std::net::Ipv4Addr;

use smoltcp::wire::{Icmpv4Packet, Ipv4Packet, TcpPacket, UdpPacket};

/// Length of the virtio header.
pub const VNET: usize = 12;
/// Length of the virtio and the Ethernet header.
pub const HEADERS: usize = VNET + 14;
/// The largest frame with its virtio header.
pub const MAX_FRAME: usize = VNET + 65535 + 18;
/// The hardware address of the gateway.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0x66, 0x6b, 0x64, 0x00, 0x01];
/// The address of the gateway.
pub const GATEWAY: Ipv4Addr = ipv4_address(forkd_net_proto::GATEWAY_ADDRESS);
/// The address of every guest.
pub const GUEST: Ipv4Addr = ipv4_address(forkd_net_proto::GUEST_ADDRESS);

const fn ipv4_address([a, b, c, d]: [u8; 4]) -> Ipv4Addr {
    Ipv4Addr::new(a, b, c, d)
}

const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_ARP: [u8; 2] = [0x08, 0x06];
const PROTO_ICMP: u8 = 1;
const PROTO_TCP: u8 = 6;
const PROTO_UDP: u8 = 17;

/// The part of a frame that matters.
#[derive(Debug, PartialEq, Eq)]
pub enum Packet<'a> {
    /// The guest asks for the hardware address of the gateway.
    ArpRequest {
        sender: Ipv4Addr,
    },
    Tcp(Segment<'a>),
    Udp(Datagram<'a>),
    /// An echo request, as an IPv4 packet.
    Echo {
        to: Ipv4Addr,
        packet: &'a [u8],
    },
}

/// A TCP segment of the guest.
#[derive(Debug, PartialEq, Eq)]
pub struct Segment<'a> {
    /// The whole IPv4 packet.
    pub packet: &'a [u8],
    pub source_port: u16,
    pub to: Ipv4Addr,
    pub port: u16,
    pub syn: bool,
    pub ack: bool,
    pub rst: bool,
}

/// A UDP datagram of the guest.
#[derive(Debug, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// The whole IPv4 packet.
    pub packet: &'a [u8],
    pub source_port: u16,
    pub to: Ipv4Addr,
    pub port: u16,
    pub payload: &'a [u8],
}

/// A parsed frame and the hardware address of its sender.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    pub source: [u8; 6],
    pub packet: Packet<'a>,
}

/// Parses a frame with its virtio header.
pub fn parse(frame: &[u8]) -> Option<Frame<'_>> {
    let source: [u8; 6] = frame.get(VNET + 6..VNET + 12)?.try_into().ok()?;
    if source[0] & 1 == 1 {
        return None;
    }
    let body = frame.get(HEADERS..)?;
    let kind: [u8; 2] = frame.get(VNET + 12..HEADERS)?.try_into().ok()?;
    let packet = match kind {
        ETHERTYPE_ARP => arp(body)?,
        ETHERTYPE_IPV4 => ipv4(body)?,
        _ => return None,
    };
    Some(Frame { source, packet })
}

fn arp(body: &[u8]) -> Option<Packet<'_>> {
    // Ethernet, IPv4, sizes 6 and 4, request.
    if body.get(..8)? != [0, 1, 8, 0, 6, 4, 0, 1] {
        return None;
    }
    let sender: [u8; 4] = body.get(14..18)?.try_into().ok()?;
    let target: [u8; 4] = body.get(24..28)?.try_into().ok()?;
    (Ipv4Addr::from(target) == GATEWAY).then_some(Packet::ArpRequest {
        sender: sender.into(),
    })
}

fn ipv4(body: &[u8]) -> Option<Packet<'_>> {
    let ip = Ipv4Packet::new_checked(body).ok()?;
    let total = usize::from(ip.total_len());
    let header = usize::from(ip.header_len());
    // Fragments are not served: the guest's packets are never larger than its link.
    if ip.version() != 4 || ip.src_addr() != GUEST || ip.more_frags() || ip.frag_offset() != 0 {
        return None;
    }
    let packet = body.get(..total)?;
    let payload = packet.get(header..)?;
    let to = ip.dst_addr();
    match u8::from(ip.next_header()) {
        PROTO_TCP => tcp(packet, payload, to),
        PROTO_UDP => udp(packet, payload, to),
        PROTO_ICMP => {
            let icmp = Icmpv4Packet::new_checked(payload).ok()?;
            let request = u8::from(icmp.msg_type()) == 8 && icmp.msg_code() == 0;
            request.then_some(Packet::Echo { to, packet })
        }
        _ => None,
    }
}

fn tcp<'a>(packet: &'a [u8], payload: &[u8], to: Ipv4Addr) -> Option<Packet<'a>> {
    let tcp = TcpPacket::new_checked(payload).ok()?;
    if tcp.src_port() == 0 || tcp.dst_port() == 0 {
        return None;
    }
    Some(Packet::Tcp(Segment {
        packet,
        source_port: tcp.src_port(),
        to,
        port: tcp.dst_port(),
        syn: tcp.syn(),
        ack: tcp.ack(),
        rst: tcp.rst(),
    }))
}

fn udp<'a>(packet: &'a [u8], payload: &'a [u8], to: Ipv4Addr) -> Option<Packet<'a>> {
    let udp = UdpPacket::new_checked(payload).ok()?;
    if udp.src_port() == 0 || udp.dst_port() == 0 {
        return None;
    }
    Some(Packet::Udp(Datagram {
        packet,
        source_port: udp.src_port(),
        to,
        port: udp.dst_port(),
        payload: payload.get(8..usize::from(udp.len()))?,
    }))
}

/// Raises the maximum segment size in a SYN, so that smoltcp sends segments of up to 64 KiB; returns the guest's own.
/// The guest's size goes into the virtio header of each large frame.
pub fn raise_mss(packet: &mut [u8]) -> u16 {
    const DEFAULT: u16 = 536;
    let header = usize::from(packet.first().copied().unwrap_or(0) & 0xf) * 4;
    let Some(tcp) = packet.get_mut(header..) else {
        return DEFAULT;
    };
    let end = usize::from(tcp.get(12).copied().unwrap_or(0) >> 4) * 4;
    let Some(mut options) = tcp.get_mut(20..end) else {
        return DEFAULT;
    };
    loop {
        match options {
            [2, 4, high, low, ..] => {
                let own = u16::from_be_bytes([*high, *low]);
                [*high, *low] = (65535u16 - 40).to_be_bytes();
                return own.max(64);
            }
            [0, ..] | [] => return DEFAULT,
            [1, rest @ ..] => options = rest,
            [_, len, ..] => {
                let len = usize::from(*len).max(2);
                match options.get_mut(len..) {
                    Some(rest) => options = rest,
                    None => return DEFAULT,
                }
            }
            [_] => return DEFAULT,
        }
    }
}

/// A frame for the guest with room for a packet; [`finish`] completes it.
pub fn frame(to: [u8; 6], kind: [u8; 2], len: usize) -> Vec<u8> {
    let mut frame = vec![0; HEADERS + len];
    address(&mut frame, to, kind);
    frame
}

/// Writes the headers before an IPv4 packet into a buffer that had another frame.
pub fn address_ipv4(frame: &mut [u8], to: [u8; 6]) {
    address(frame, to, ETHERTYPE_IPV4);
}

fn address(frame: &mut [u8], to: [u8; 6], kind: [u8; 2]) {
    if let Some(vnet) = frame.get_mut(..VNET) {
        vnet.fill(0);
    }
    let parts = [&to[..], &GATEWAY_MAC[..], &kind[..]];
    let mut at = VNET;
    for part in parts {
        if let Some(place) = frame.get_mut(at..at + part.len()) {
            place.copy_from_slice(part);
        }
        at += part.len();
    }
}

/// A frame for an IPv4 packet.
pub fn ipv4_frame(to: [u8; 6], len: usize) -> Vec<u8> {
    frame(to, ETHERTYPE_IPV4, len)
}

/// Fills in the checksum of the pseudo header and the virtio header. `mss` cuts larger TCP segments in the guest.
pub fn finish(frame: &mut [u8], mss: u16) {
    let Some((headers, packet)) = frame.split_at_mut_checked(HEADERS) else {
        return;
    };
    let header = usize::from(packet.first().copied().unwrap_or(0) & 0xf) * 4;
    let protocol = packet.get(9).copied().unwrap_or(0);
    let (offset, tcp_header) = match protocol {
        PROTO_TCP => {
            let words = packet.get(header + 12).copied().unwrap_or(0) >> 4;
            (16, usize::from(words) * 4)
        }
        PROTO_UDP => (6, 8),
        _ => return,
    };
    let len = packet.len().saturating_sub(header);
    let mut sum = u32::from(protocol) + u32::try_from(len).unwrap_or(0);
    for pair in packet.get(12..20).unwrap_or_default().chunks_exact(2) {
        sum += u32::from(u16::from_be_bytes([pair[0], pair[1]]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let sum = u16::try_from(sum).unwrap_or(0);
    if let Some(place) = packet.get_mut(header + offset..header + offset + 2) {
        place.copy_from_slice(&sum.to_be_bytes());
    }
    let small = |value: usize| u16::try_from(value).unwrap_or(0).to_le_bytes();
    let payload = len.saturating_sub(tcp_header);
    let mut vnet = [0; VNET];
    vnet[0] = 1;
    if protocol == PROTO_TCP && payload > usize::from(mss) {
        vnet[1] = 1;
        vnet[2..4].copy_from_slice(&small(14 + header + tcp_header));
        vnet[4..6].copy_from_slice(&mss.to_le_bytes());
    }
    vnet[6..8].copy_from_slice(&small(14 + header));
    vnet[8..10].copy_from_slice(&small(offset));
    if let Some(place) = headers.get_mut(..VNET) {
        place.copy_from_slice(&vnet);
    }
}

/// The answer to a request for the gateway's hardware address.
pub fn arp_reply(to: [u8; 6], sender: Ipv4Addr) -> Vec<u8> {
    let mut reply = frame(to, ETHERTYPE_ARP, 28);
    let mut body = vec![0, 1, 8, 0, 6, 4, 0, 2];
    body.extend(GATEWAY_MAC);
    body.extend(GATEWAY.octets());
    body.extend(to);
    body.extend(sender.octets());
    if let Some(place) = reply.get_mut(HEADERS..) {
        place.copy_from_slice(&body);
    }
    reply
}

/// A reset that answers a segment; none for a reset.
pub fn reset_for(to: [u8; 6], segment: &Segment<'_>) -> Option<Vec<u8>> {
    if segment.rst {
        return None;
    }
    let header = usize::from(segment.packet.first()? & 0xf) * 4;
    let tcp = TcpPacket::new_checked(segment.packet.get(header..)?).ok()?;
    let mut frame = ipv4_frame(to, 40);
    write_ipv4(frame.get_mut(HEADERS..)?, PROTO_TCP, segment.to);
    let mut answer = TcpPacket::new_unchecked(frame.get_mut(HEADERS + 20..)?);
    answer.set_src_port(segment.port);
    answer.set_dst_port(segment.source_port);
    answer.set_header_len(20);
    answer.clear_flags();
    answer.set_rst(true);
    if segment.ack {
        answer.set_seq_number(tcp.ack_number());
    } else {
        answer.set_ack(true);
        answer.set_ack_number(tcp.seq_number() + tcp.segment_len());
    }
    finish(&mut frame, u16::MAX);
    Some(frame)
}

/// A datagram for the guest.
pub fn datagram(
    to: [u8; 6],
    from: Ipv4Addr,
    from_port: u16,
    port: u16,
    payload: &[u8],
) -> Option<Vec<u8>> {
    let len = u16::try_from(8 + payload.len()).ok()?;
    len.checked_add(20)?;
    let mut frame = ipv4_frame(to, 20 + usize::from(len));
    write_ipv4(frame.get_mut(HEADERS..)?, PROTO_UDP, from);
    let mut udp = UdpPacket::new_unchecked(frame.get_mut(HEADERS + 20..)?);
    udp.set_src_port(from_port);
    udp.set_dst_port(port);
    udp.set_len(len);
    udp.payload_mut().copy_from_slice(payload);
    finish(&mut frame, u16::MAX);
    Some(frame)
}

/// An ICMP error: the destination of a packet is unreachable, with this code.
pub fn unreachable(to: [u8; 6], from: Ipv4Addr, code: u8, packet: &[u8]) -> Option<Vec<u8>> {
    let header = usize::from(packet.first()? & 0xf) * 4;
    let quoted = packet.get(..(header + 8).min(packet.len()))?;
    let mut frame = ipv4_frame(to, 28 + quoted.len());
    write_ipv4(frame.get_mut(HEADERS..)?, PROTO_ICMP, from);
    let icmp = frame.get_mut(HEADERS + 20..)?;
    icmp[0] = 3;
    icmp[1] = code;
    icmp.get_mut(8..)?.copy_from_slice(quoted);
    Icmpv4Packet::new_unchecked(icmp).fill_checksum();
    Some(frame)
}

/// The answer to an echo request.
pub fn echo_reply(to: [u8; 6], from: Ipv4Addr, packet: &[u8]) -> Option<Vec<u8>> {
    let header = usize::from(packet.first()? & 0xf) * 4;
    let request = packet.get(header..)?;
    let mut frame = ipv4_frame(to, 20 + request.len());
    write_ipv4(frame.get_mut(HEADERS..)?, PROTO_ICMP, from);
    let icmp = frame.get_mut(HEADERS + 20..)?;
    icmp.copy_from_slice(request);
    icmp[0] = 0;
    Icmpv4Packet::new_unchecked(icmp).fill_checksum();
    Some(frame)
}

/// Writes the header of a packet from `from` to the guest.
fn write_ipv4(packet: &mut [u8], protocol: u8, from: Ipv4Addr) {
    let len = u16::try_from(packet.len()).unwrap_or(u16::MAX);
    let mut ip = Ipv4Packet::new_unchecked(packet);
    ip.set_version(4);
    ip.set_header_len(20);
    ip.set_total_len(len);
    ip.set_dont_frag(true);
    ip.set_hop_limit(64);
    ip.set_next_header(protocol.into());
    ip.set_src_addr(from);
    ip.set_dst_addr(GUEST);
    ip.fill_checksum();
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GUEST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];

    /// A segment as a guest sends it.
    fn syn(options: &[u8]) -> Vec<u8> {
        let mut frame = ipv4_frame(GATEWAY_MAC, 40 + options.len());
        frame[VNET + 6..VNET + 12].copy_from_slice(&GUEST_MAC);
        write_ipv4(&mut frame[HEADERS..], PROTO_TCP, GUEST);
        Ipv4Packet::new_unchecked(&mut frame[HEADERS..])
            .set_dst_addr(Ipv4Addr::new(198, 51, 100, 7));
        let mut tcp = TcpPacket::new_unchecked(&mut frame[HEADERS + 20..]);
        tcp.set_src_port(40000);
        tcp.set_dst_port(80);
        tcp.set_header_len(u8::try_from(20 + options.len()).unwrap());
        tcp.set_syn(true);
        frame[HEADERS + 40..].copy_from_slice(options);
        frame
    }

    #[test]
    fn a_syn_is_parsed_and_answered_with_a_reset() {
        let frame = syn(&[]);
        let Some(Frame {
            source: GUEST_MAC,
            packet: Packet::Tcp(segment),
        }) = parse(&frame)
        else {
            panic!("not parsed");
        };
        assert_eq!(
            (segment.source_port, segment.port, segment.syn),
            (40000, 80, true)
        );
        let reset = reset_for(GUEST_MAC, &segment).unwrap();
        let tcp = TcpPacket::new_checked(&reset[HEADERS + 20..]).unwrap();
        assert!(tcp.rst() && tcp.ack());
        assert_eq!((tcp.src_port(), tcp.dst_port()), (80, 40000));
        assert_eq!(reset[0], 1);
    }

    #[test]
    fn the_segment_size_is_raised_and_the_guests_kept() {
        let mut frame = syn(&[1, 3, 3, 7, 2, 4, 5, 0xb4]);
        assert_eq!(raise_mss(&mut frame[HEADERS..]), 1460);
        assert_eq!(raise_mss(&mut frame[HEADERS..]), 65495);
        for options in [&[2, 4, 5][..], &[8, 0, 0, 0], &[8, 200, 0, 0], &[]] {
            let mut padded = options.to_vec();
            padded.resize(options.len().div_ceil(4) * 4, 0);
            let mut frame = syn(&padded);
            let mss = raise_mss(&mut frame[HEADERS..]);
            assert!(mss == 536 || options.starts_with(&[2]), "{options:?} {mss}");
        }
    }

    #[test]
    fn large_segments_are_cut_by_the_guest() {
        let mut frame = ipv4_frame(GUEST_MAC, 40 + 5000);
        write_ipv4(&mut frame[HEADERS..], PROTO_TCP, GATEWAY);
        TcpPacket::new_unchecked(&mut frame[HEADERS + 20..]).set_header_len(20);
        finish(&mut frame, 1460);
        assert_eq!(frame[..VNET], [1, 1, 54, 0, 0xb4, 5, 34, 0, 16, 0, 0, 0]);
    }

    proptest! {
        #[test]
        fn any_frame_is_survived(mut bytes in prop::collection::vec(any::<u8>(), 0..200), kind in 0..3) {
            if let (0 | 1, Some(place)) = (kind, bytes.get_mut(VNET + 12..HEADERS)) {
                place.copy_from_slice(if kind == 0 { &ETHERTYPE_IPV4 } else { &ETHERTYPE_ARP });
            }
            if let Some(Frame { packet: Packet::Tcp(segment), .. }) = parse(&bytes) {
                let _ = reset_for(GUEST_MAC, &segment);
                let _ = raise_mss(&mut segment.packet.to_vec());
            }
            let _ = raise_mss(&mut bytes.clone());
            finish(&mut bytes, 1000);
        }
    }
}
