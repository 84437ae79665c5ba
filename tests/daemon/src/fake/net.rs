//! The network device of a fake VM: one TCP segment at a time, sent by hand.
//!
//! [`Device::knock`] sends a segment to a destination and reports how the network engine answers. A guest that was copied
//! has the memory of its source and a socket of its own, so [`Knock::Resume`] is the segment of an inherited connection.

use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::vm::lock;

/// Length of the virtio header before each frame.
const VNET: usize = 12;
const ETHERNET: usize = 14;
const IPV4: usize = 20;
const TCP: usize = 20;
const GUEST: [u8; 4] = [10, 42, 0, 2];
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;
/// How long the engine may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The kind of segment that a guest sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Knock {
    /// Opens a connection.
    Open,
    /// Belongs to a connection that was opened before.
    Resume,
}

/// The frame socket of a VM, if it has one.
#[derive(Debug, Default)]
pub struct Device {
    socket: Mutex<Option<OwnedFd>>,
}

impl Device {
    /// Takes another back end, or none.
    pub fn set(&self, socket: Option<OwnedFd>) {
        *lock(&self.socket) = socket;
    }

    /// Sends a segment. The answer is `open`, `reset`, `silent`, or `unplugged` without a back end.
    pub fn knock(&self, knock: Knock, port: u16, to: Ipv4Addr) -> &'static str {
        let socket = lock(&self.socket);
        let Some(socket) = socket.as_ref() else {
            return "unplugged";
        };
        // Frames about earlier connections are of no interest.
        let mut old = vec![0; 65536];
        while let Ok((_, 1..)) = recv(socket.as_fd(), &mut old[..], RecvFlags::DONTWAIT) {}
        let flags = match knock {
            Knock::Open => SYN,
            Knock::Resume => ACK,
        };
        if send(socket, &frame(flags, to, port), SendFlags::NOSIGNAL).is_err() {
            return "unplugged";
        }
        let started = Instant::now();
        while let Some(left) = PATIENCE.checked_sub(started.elapsed()) {
            let mut ready = [PollFd::new(socket, PollFlags::IN)];
            let limit = Timespec::try_from(left).ok();
            if !matches!(poll(&mut ready, limit.as_ref()), Ok(1..)) {
                continue;
            }
            let mut buffer = vec![0; 65536];
            let flags = RecvFlags::DONTWAIT;
            match recv(socket.as_fd(), &mut buffer[..], flags) {
                Ok((_, 0)) => return "unplugged",
                Ok((_, len)) => {
                    if let Some(answer) = answer(buffer.get(..len).unwrap_or_default(), port) {
                        return answer;
                    }
                }
                Err(_) => {}
            }
        }
        "silent"
    }
}

/// A TCP segment of the guest. The engine does not check its checksums.
fn frame(flags: u8, to: Ipv4Addr, port: u16) -> Vec<u8> {
    let mut frame = vec![0; VNET];
    frame.extend([2, 0x66, 0x6b, 0x64, 0, 1]);
    frame.extend(MAC);
    frame.extend([8, 0]);
    let length = (IPV4 + TCP) as u16;
    frame.extend([0x45, 0]);
    frame.extend(length.to_be_bytes());
    frame.extend([0, 0, 0, 0, 64, 6, 0, 0]);
    frame.extend(GUEST);
    frame.extend(to.octets());
    frame.extend(source_port(port).to_be_bytes());
    frame.extend(port.to_be_bytes());
    frame.extend(7000u32.to_be_bytes());
    frame.extend(0u32.to_be_bytes());
    frame.extend([0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    frame
}

/// The port of the guest, the same for every segment to one destination.
fn source_port(port: u16) -> u16 {
    port ^ 0x8000
}

/// The verdict in a frame for the guest; `None` for frames about something else.
fn answer(frame: &[u8], port: u16) -> Option<&'static str> {
    let tcp = frame.get(VNET + ETHERNET + IPV4..)?;
    let to = u16::from_be_bytes(tcp.get(2..4)?.try_into().ok()?);
    if to != source_port(port) {
        return None;
    }
    let flags = *tcp.get(13)?;
    if flags & RST != 0 {
        Some("reset")
    } else if flags & (SYN | ACK) != 0 {
        Some("open")
    } else {
        None
    }
}
