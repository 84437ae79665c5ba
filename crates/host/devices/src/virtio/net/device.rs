//! The network device.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use forkd_vmm_proto::{NetBackend, RateLimit};
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF,
};

use super::backend::Backend;
use super::event_handler::{RX, TX};
use super::{NetMetrics, NetState};
use crate::Ready;
use crate::metrics::Counters;
use crate::rate::RateLimiter;
use crate::virtio::{
    Activation, DeviceError, DeviceState, FIRST_DEVICE_TOKEN, RestoreError, VirtioDevice,
    add_timer, feature, read_config_bytes,
};

const TYPE: u32 = 1;
pub(super) const BACKEND: u32 = FIRST_DEVICE_TOKEN;
const RX_TIMER: u32 = FIRST_DEVICE_TOKEN + 1;
const TX_TIMER: u32 = FIRST_DEVICE_TOKEN + 2;

/// The network device.
#[derive(Debug)]
pub struct Net {
    pub(super) active: Option<Activation>,
    /// Without a back end frames of the guest are dropped and none come.
    pub(super) backend: Option<Backend>,
    mac: [u8; 6],
    pub(super) rx_limiter: RateLimiter,
    pub(super) tx_limiter: RateLimiter,
    /// The frame in hand, if any, with its header.
    pub(super) buffer: Vec<u8>,
    /// Length of the frame that waits.
    pub(super) frame: Option<usize>,
    pub(super) mergeable: bool,
    /// The events that the loop listens to.
    pub(super) registered: Option<Ready>,
    pub(super) wants_frames: bool,
    pub(super) rx_held: bool,
    pub(super) tx_blocked: bool,
    /// The back end has nothing more to give.
    pub(super) ended: bool,
    pub(super) metrics: Arc<NetMetrics>,
}

impl Net {
    /// A device with a hardware address; the limits hold for each direction. A device that is restored takes the
    /// address of its state instead.
    pub fn new(
        mac: [u8; 6],
        backend: Option<(OwnedFd, NetBackend)>,
        rate: RateLimit,
    ) -> io::Result<Self> {
        Ok(Self {
            active: None,
            backend: open(backend)?,
            mac,
            rx_limiter: RateLimiter::new(rate)?,
            tx_limiter: RateLimiter::new(rate)?,
            buffer: Vec::new(),
            frame: None,
            mergeable: false,
            registered: None,
            wants_frames: false,
            rx_held: false,
            tx_blocked: false,
            ended: false,
            metrics: Arc::default(),
        })
    }

    /// Exchanges the back end. On an error the old one stays.
    ///
    /// The link is up all the time: a guest that was told otherwise would drop its first packets until it has noticed
    /// the change. A frame in hand belongs to the old network and is dropped.
    pub fn set_backend(&mut self, backend: Option<(OwnedFd, NetBackend)>) -> io::Result<()> {
        let new = open(backend)?;
        self.detach();
        self.backend = new;
        self.frame = None;
        self.buffer = Vec::new();
        self.ended = false;
        self.tx_blocked = false;
        if self.active.is_some() {
            self.wants_frames = true;
            self.listen();
        }
        if let Some(active) = &self.active {
            // The device thread goes on with the frames that waited for the old back end.
            active.again(RX);
            active.again(TX);
        }
        Ok(())
    }

    /// Stops listening to the back end.
    fn detach(&mut self) {
        if let (Some(active), Some(backend)) = (&self.active, &self.backend)
            && self.registered.take().is_some()
        {
            active.events.remove(backend);
        }
    }
}

fn open(backend: Option<(OwnedFd, NetBackend)>) -> io::Result<Option<Backend>> {
    backend.map(|(fd, kind)| Backend::new(fd, kind)).transpose()
}

impl VirtioDevice for Net {
    fn device_type(&self) -> u32 {
        TYPE
    }

    fn queue_sizes(&self) -> &'static [u16] {
        &[256, 256]
    }

    fn features(&self) -> u64 {
        feature::COMMON
            | 1 << VIRTIO_NET_F_MAC
            | 1 << VIRTIO_NET_F_MRG_RXBUF
            | 1 << VIRTIO_NET_F_CSUM
            | 1 << VIRTIO_NET_F_HOST_TSO4
            | 1 << VIRTIO_NET_F_HOST_TSO6
            | 1 << VIRTIO_NET_F_HOST_ECN
            | 1 << VIRTIO_NET_F_GUEST_CSUM
            | 1 << VIRTIO_NET_F_GUEST_TSO4
            | 1 << VIRTIO_NET_F_GUEST_TSO6
            | 1 << VIRTIO_NET_F_GUEST_ECN
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.mac, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        add_timer(&activation.events, self.rx_limiter.timer(), RX_TIMER)?;
        add_timer(&activation.events, self.tx_limiter.timer(), TX_TIMER)?;
        self.mergeable = activation.has(1 << VIRTIO_NET_F_MRG_RXBUF);
        self.active = Some(activation);
        self.wants_frames = true;
        self.listen();
        Ok(())
    }

    fn activation(&self) -> Option<&Activation> {
        self.active.as_ref()
    }

    fn reset(&mut self) {
        self.detach();
        if let Some(active) = self.active.take() {
            for limiter in [&self.rx_limiter, &self.tx_limiter] {
                if let Some(timer) = limiter.timer() {
                    active.events.remove(timer);
                }
            }
        }
        self.registered = None;
        self.frame = None;
        self.buffer = Vec::new();
        self.wants_frames = false;
        self.rx_held = false;
        self.tx_blocked = false;
    }

    fn on_queue(&mut self, queue: usize) -> Result<(), DeviceError> {
        match queue {
            RX => self.receive(),
            TX => self.transmit(),
            _ => Ok(()),
        }
    }

    fn on_event(&mut self, token: u32, ready: Ready) -> Result<(), DeviceError> {
        match token {
            BACKEND => {
                if ready.intersects(Ready::OUT | Ready::ERR | Ready::HUP) && self.tx_blocked {
                    self.tx_blocked = false;
                    self.transmit()?;
                }
                self.receive()
            }
            RX_TIMER => {
                self.rx_limiter.on_timer();
                self.receive()
            }
            TX_TIMER => {
                self.tx_limiter.on_timer();
                self.transmit()
            }
            _ => Ok(()),
        }
    }

    fn save(&self) -> DeviceState {
        DeviceState::Net(NetState::V1 {
            mac: self.mac,
            rx_rate: self.rx_limiter.save(),
            tx_rate: self.tx_limiter.save(),
        })
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError> {
        let DeviceState::Net(NetState::V1 {
            mac,
            rx_rate,
            tx_rate,
        }) = state
        else {
            return Err(RestoreError::Device("it is not that of a network device"));
        };
        if mac[0] & 1 == 1 {
            return Err(RestoreError::Device(
                "its hardware address is a group address",
            ));
        }
        self.mac = mac;
        self.rx_limiter.restore(rx_rate);
        self.tx_limiter.restore(tx_rate);
        Ok(())
    }

    fn counters(&self) -> Arc<dyn Counters> {
        Arc::clone(&self.metrics) as _
    }
}

#[cfg(test)]
mod tests;
