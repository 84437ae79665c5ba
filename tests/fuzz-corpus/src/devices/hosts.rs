//! The host side of each device under test.
//!
//! A [`Host`] creates a device and acts as its back end, controlled by the input.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forkd_devices::disk::{self, Layer};
use forkd_devices::testing::Rig;
use forkd_devices::virtio::VirtioDevice;
use forkd_devices::virtio::balloon::Balloon;
use forkd_devices::virtio::block::Block;
use forkd_devices::virtio::net::Net;
use forkd_devices::virtio::rng::Rng;
use forkd_devices::virtio::vsock::Vsock;
use forkd_devices::{DeviceEvents, MemoryReclaim};
use forkd_vmm_proto::{NetBackend, RateLimit};
use rustix::fs::MemfdFlags;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};

use crate::input::Input;

const DISK: u64 = 256 << 10;
pub(super) const CID: u32 = 3;
const MAX_CLIENTS: usize = 6;

/// Creates a device and acts as its back end.
pub(super) trait Host {
    fn device(&mut self, rig: &Rig) -> Box<dyn VirtioDevice>;
    fn act(&mut self, rig: &Rig, input: &mut Input<'_>);
}

/// A file in memory.
pub(crate) fn memory_file() -> File {
    match rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC) {
        Ok(fd) => File::from(fd),
        Err(errno) => panic!("no memory file: {errno}"),
    }
}

#[derive(Clone, Copy, Default)]
pub(super) struct RngHost;

impl Host for RngHost {
    fn device(&mut self, _rig: &Rig) -> Box<dyn VirtioDevice> {
        Box::new(Rng::new(RateLimit::default()).expect("no timer is made without a limit"))
    }

    fn act(&mut self, _rig: &Rig, _input: &mut Input<'_>) {}
}

pub(super) struct BlockHost {
    base: File,
    layers: Vec<File>,
}

impl BlockHost {
    pub(super) fn new() -> Self {
        let base = memory_file();
        base.set_len(DISK).expect("a memory file has any length");
        Self {
            base,
            layers: vec![new_layer()],
        }
    }
}

fn new_layer() -> File {
    let file = memory_file();
    let copy = file.try_clone().expect("descriptors are not short");
    drop(Layer::create(copy, DISK, DISK / 2).expect("the size is one of a disk"));
    file
}

fn copy(file: &File) -> File {
    file.try_clone().expect("descriptors are not short")
}

impl Host for BlockHost {
    fn device(&mut self, rig: &Rig) -> Box<dyn VirtioDevice> {
        // The top layer has to write its map first.
        let pushed = rig.transport.with(|block: &mut Block| {
            let next = new_layer();
            block.push_layer(copy(&next)).map(|()| next)
        });
        if let Some(Ok(next)) = pushed {
            // The old device goes on with its own layer; the new one gets another.
            drop(next);
            self.layers.push(new_layer());
        }
        let layers = self.layers.iter().map(copy).collect();
        let disk = disk::open(copy(&self.base), layers, false).expect("the layers are whole");
        Box::new(Block::new(disk, "fuzz", RateLimit::default()).expect("there is no limit"))
    }

    fn act(&mut self, _rig: &Rig, _input: &mut Input<'_>) {}
}

#[derive(Default)]
pub(super) struct NetHost {
    peer: Option<OwnedFd>,
}

impl Host for NetHost {
    fn device(&mut self, _rig: &Rig) -> Box<dyn VirtioDevice> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
            None,
        )
        .expect("descriptors are not short");
        self.peer = Some(theirs);
        let backend = Some((ours, NetBackend::Socket));
        let net = Net::new([2; 6], backend, RateLimit::default());
        Box::new(net.expect("there is no limit"))
    }

    fn act(&mut self, _rig: &Rig, input: &mut Input<'_>) {
        let Some(peer) = &self.peer else {
            return;
        };
        match input.u8() % 8 {
            0 => self.peer = None,
            1 => {
                let mut frame = [0; 2048];
                let _ = rustix::io::read(peer, &mut frame);
            }
            _ => {
                let frame = vec![input.u8(); usize::from(input.u16() % 20_000)];
                let _ = rustix::net::send(peer, &frame, SendFlags::NOSIGNAL);
            }
        }
    }
}

struct Nowhere;

impl MemoryReclaim for Nowhere {
    fn discard(&self, addr: u64, len: u64) -> std::io::Result<()> {
        assert!(addr.is_multiple_of(4096) && len.is_multiple_of(4096));
        assert!(addr + len <= forkd_devices::testing::MEMORY as u64);
        Ok(())
    }
}

#[derive(Clone, Copy, Default)]
pub(super) struct BalloonHost;

impl Host for BalloonHost {
    fn device(&mut self, _rig: &Rig) -> Box<dyn VirtioDevice> {
        Box::new(Balloon::new(Arc::new(Nowhere)))
    }

    fn act(&mut self, rig: &Rig, input: &mut Input<'_>) {
        rig.transport.with(|balloon: &mut Balloon| {
            if input.u8() & 1 == 0 {
                balloon.set_target(input.u32());
            } else {
                // An unusable ring is found at the next doorbell.
                let _ = balloon.ask_for_stats();
            }
        });
    }
}

#[derive(Default)]
pub(super) struct VsockHost {
    address: Option<SocketAddr>,
    clients: Vec<UnixStream>,
}

static SOCKETS: AtomicU64 = AtomicU64::new(0);

impl Host for VsockHost {
    fn device(&mut self, rig: &Rig) -> Box<dyn VirtioDevice> {
        let number = SOCKETS.fetch_add(1, Ordering::Relaxed);
        let name = format!("forkd-fuzz-{}-{number}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).expect("the name is short");
        let listener = UnixListener::bind_addr(&address).expect("the name is not taken");
        self.address = Some(address);
        self.clients.clear();
        let events: Arc<dyn DeviceEvents> = rig.events.clone();
        Box::new(Vsock::new(CID, listener.into(), events).expect("the context id is good"))
    }

    fn act(&mut self, rig: &Rig, input: &mut Input<'_>) {
        let which = usize::from(input.u8()) % MAX_CLIENTS;
        let action = input.u8() % 6;
        if action == 5 {
            rig.events.get().streams.clear();
            return;
        }
        let Some(mut client) = self.clients.get(which) else {
            if let Some(client) = self
                .address
                .as_ref()
                .and_then(|address| UnixStream::connect_addr(address).ok())
            {
                let _ = client.set_nonblocking(true);
                let port = input.u8() % 4;
                let _ = (&client).write_all(format!("CONNECT {port}\n").as_bytes());
                self.clients.push(client);
            }
            return;
        };
        match action {
            0 => drop(self.clients.swap_remove(which)),
            1 => drop(client.shutdown(std::net::Shutdown::Write)),
            2 => drop(client.read(&mut [0; 4096])),
            _ => drop(client.write(&vec![7; usize::from(input.u16())])),
        }
    }
}

/// A packet whose ports probably belong to a connection.
pub(super) fn vsock_packet(input: &mut Input<'_>) -> Vec<u8> {
    const FIRST_HOST_PORT: u32 = 1 << 30;
    let shape = input.u8();
    let op = u16::from(input.u8() % 9);
    let host = match shape & 3 {
        0 => u32::from(input.u8() % 4),
        1 => input.u32(),
        _ => FIRST_HOST_PORT + u32::from(input.u8() % 4),
    };
    let guest = u32::from(input.u8() % 4);
    let data = vec![shape; usize::from(input.u16() % 5000)];
    let data = if op == 5 { &data[..] } else { &[] };
    let len = match shape >> 2 & 31 {
        0 => input.u32(),
        _ => data.len() as u32,
    };
    let mut packet = Vec::with_capacity(44 + data.len());
    packet.extend(u64::from(CID).to_le_bytes());
    packet.extend(2u64.to_le_bytes());
    packet.extend(guest.to_le_bytes());
    packet.extend(host.to_le_bytes());
    packet.extend(len.to_le_bytes());
    packet.extend(1u16.to_le_bytes());
    packet.extend(op.to_le_bytes());
    packet.extend(u32::from(input.u8()).to_le_bytes());
    packet.extend((u32::from(input.u16()) * 4).to_le_bytes());
    packet.extend(input.u32().to_le_bytes());
    packet.extend(data);
    packet
}

/// A device of a virtio type without a back end.
pub(crate) fn device_of_type(kind: u32, rig: &Rig) -> Option<Box<dyn VirtioDevice>> {
    Some(match kind {
        1 => NetHost::default().device(rig),
        2 => BlockHost::new().device(rig),
        4 => RngHost.device(rig),
        5 => BalloonHost.device(rig),
        19 => VsockHost::default().device(rig),
        _ => return None,
    })
}
