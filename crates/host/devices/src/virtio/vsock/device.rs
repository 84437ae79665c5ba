//! The socket device: life cycle and saved state.
//!
//! A snapshot holds the ports of connections, not the connections: after a restore the guest is sent a reset
//! for each.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use super::connection::Ports;
use super::event_handler::{RX, TX};
use super::muxer::{FIRST_HOST_PORT, MAX_BELIEVED, Muxer, Tokens};
use super::{VsockMetrics, VsockState};
use crate::metrics::Counters;
use crate::virtio::{
    Activation, DeviceError, DeviceState, FIRST_DEVICE_TOKEN, RestoreError, VirtioDevice, feature,
    read_config_bytes,
};
use crate::{DeviceEvents, Ready};

const TYPE: u32 = 19;
const TOKENS: Tokens = Tokens {
    listener: FIRST_DEVICE_TOKEN,
    retry: FIRST_DEVICE_TOKEN + 1,
    first_stream: FIRST_DEVICE_TOKEN + 2,
};
/// The first context id that a guest can have.
const FIRST_GUEST_CID: u64 = 3;

/// The socket device.
pub struct Vsock {
    pub(super) active: Option<Activation>,
    pub(super) muxer: Muxer,
    /// Data of the packet in hand.
    pub(super) buffer: Vec<u8>,
    /// Packets of the guest wait until it has taken some.
    pub(super) held: bool,
    metrics: Arc<VsockMetrics>,
}

impl Vsock {
    /// A device for a guest with a context id of 3 or more, with a listening Unix socket for clients.
    /// Clients that come before the driver is up wait in the socket's queue.
    pub fn new(cid: u32, listener: OwnedFd, events: Arc<dyn DeviceEvents>) -> io::Result<Self> {
        if u64::from(cid) < FIRST_GUEST_CID || cid == u32::MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a guest's context id is 3 or more",
            ));
        }
        let listener = UnixListener::from(listener);
        listener.set_nonblocking(true)?;
        let metrics = Arc::new(VsockMetrics::default());
        let muxer = Muxer::new(
            u64::from(cid),
            listener,
            TOKENS,
            events,
            Arc::clone(&metrics),
        )?;
        Ok(Self {
            active: None,
            muxer,
            buffer: Vec::new(),
            held: false,
            metrics,
        })
    }
}

impl VirtioDevice for Vsock {
    fn device_type(&self) -> u32 {
        TYPE
    }

    fn queue_sizes(&self) -> &'static [u16] {
        &[256, 256, 64]
    }

    fn features(&self) -> u64 {
        feature::COMMON
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.muxer.cid.to_le_bytes(), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.muxer
            .start(activation.events.clone())
            .map_err(DeviceError::Backend)?;
        self.active = Some(activation);
        Ok(())
    }

    fn activation(&self) -> Option<&Activation> {
        self.active.as_ref()
    }

    fn reset(&mut self) {
        self.muxer.stop();
        self.active = None;
        self.buffer = Vec::new();
        self.held = false;
    }

    fn on_queue(&mut self, queue: usize) -> Result<(), DeviceError> {
        match queue {
            RX => self.give_packets(),
            TX => self.take_packets(),
            // The driver leaves buffers for events there; there are none.
            _ => Ok(()),
        }
    }

    fn on_event(&mut self, token: u32, ready: Ready) -> Result<(), DeviceError> {
        if token == TOKENS.listener {
            self.muxer.on_listener();
        } else if token == TOKENS.retry {
            self.muxer.on_retry();
        } else {
            self.muxer.on_stream(token, ready);
        }
        self.give_packets()
    }

    fn save(&self) -> DeviceState {
        let believed = self.muxer.believed();
        DeviceState::Vsock(VsockState::V1 {
            cid: self.muxer.cid,
            next_port: self.muxer.next_port,
            connections: believed.iter().map(|p| (p.host, p.guest)).collect(),
        })
    }

    /// The guest keeps the context id it knows. Connections it believes in are reset when it goes on.
    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError> {
        let DeviceState::Vsock(VsockState::V1 {
            cid,
            next_port,
            connections,
        }) = state
        else {
            return Err(RestoreError::Device("it is not that of a socket device"));
        };
        if !(FIRST_GUEST_CID..u64::from(u32::MAX)).contains(&cid) {
            return Err(RestoreError::Device("a guest cannot have that context id"));
        }
        if connections.len() > MAX_BELIEVED {
            return Err(RestoreError::Device("it has too many connections"));
        }
        self.muxer.cid = cid;
        self.muxer.next_port = next_port.max(FIRST_HOST_PORT);
        self.muxer.inherited = connections
            .into_iter()
            .map(|(host, guest)| Ports { host, guest })
            .collect();
        Ok(())
    }

    fn counters(&self) -> Arc<dyn Counters> {
        Arc::clone(&self.metrics) as _
    }
}

#[cfg(test)]
mod tests;
