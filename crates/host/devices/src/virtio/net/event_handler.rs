//! The network device's part on the device thread.

use virtio_queue::QueueT;

use super::Net;
use super::backend::{MAX_FRAME, Received, Sent, VNET_HEADER};
use super::device::BACKEND;
use crate::Ready;
use crate::virtio::{Activation, Chain, DeviceError, QueueExt, Verdict};

pub(super) const RX: usize = 0;
pub(super) const TX: usize = 1;

/// The most frames to the guest in a row.
const MAX_FRAMES: u32 = 256;
/// Where in its header a frame says how many chains it takes.
const NUM_BUFFERS: usize = 10;

/// The fate of a frame for the guest.
enum Delivered {
    Yes,
    /// The guest has no room for it now.
    Later,
    /// It does not fit the guest's buffers.
    Never,
}

impl Net {
    /// Brings frames to the guest until there are none, no room, or no allowance.
    pub(super) fn receive(&mut self) -> Result<(), DeviceError> {
        let mut used = false;
        let mut starved = false;
        for turn in 0.. {
            let Some(active) = &mut self.active else {
                return Ok(());
            };
            if turn == MAX_FRAMES || active.events.should_yield() {
                active.again(RX);
                break;
            }
            if self.frame.is_none() && !self.read_frame() {
                break;
            }
            let (Some(active), Some(len)) = (&mut self.active, self.frame) else {
                break;
            };
            let frame = self.buffer.get_mut(..len).unwrap_or_default();
            match deliver(active, frame, self.mergeable)? {
                Delivered::Yes => {
                    used = true;
                    self.metrics.rx_frames.inc();
                    self.metrics.rx_bytes.add((len - VNET_HEADER) as u64);
                }
                Delivered::Later => {
                    starved = true;
                    break;
                }
                Delivered::Never => self.metrics.rx_dropped.inc(),
            }
            self.frame = None;
        }
        if let (true, Some(active)) = (used, &mut self.active) {
            active.notify(RX)?;
        }
        self.wants_frames = !starved && !self.rx_held;
        self.listen();
        Ok(())
    }

    /// Reads the next frame; false if there is none for now.
    fn read_frame(&mut self) -> bool {
        if !self.rx_limiter.ready() {
            self.metrics.rx_throttled.inc();
            self.rx_held = true;
            return false;
        }
        self.rx_held = false;
        self.buffer.resize(VNET_HEADER + MAX_FRAME, 0);
        let received = match &self.backend {
            Some(backend) => backend.receive(&mut self.buffer),
            None => Received::Nothing,
        };
        match received {
            Received::Frame(len) if len > VNET_HEADER => {
                self.rx_limiter.charge((len - VNET_HEADER) as u64);
                self.frame = Some(len);
                true
            }
            Received::Frame(_) | Received::Nothing => {
                self.buffer = Vec::new();
                false
            }
            Received::End => {
                self.buffer = Vec::new();
                self.ended = true;
                false
            }
        }
    }

    /// Takes frames from the guest.
    pub(super) fn transmit(&mut self) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let (limiter, metrics, backend) = (&mut self.tx_limiter, &self.metrics, &self.backend);
        let blocked = &mut self.tx_blocked;
        let mut packet = Vec::new();
        active.drain(TX, |memory, chain| {
            if !limiter.ready() {
                metrics.tx_throttled.inc();
                return Ok(Verdict::Hold);
            }
            let mut reader = chain.reader(memory);
            let len = reader.left();
            if len < VNET_HEADER {
                return Err(DeviceError::Protocol("a frame is shorter than its header"));
            }
            if len == VNET_HEADER || len > VNET_HEADER + MAX_FRAME {
                metrics.tx_dropped.inc();
                return Ok(Verdict::Used(0));
            }
            packet.resize(len, 0);
            reader.read(&mut packet)?;
            *blocked = false;
            match backend.as_ref().map_or(Sent::Never, |to| to.send(&packet)) {
                Sent::Yes => {
                    metrics.tx_frames.inc();
                    metrics.tx_bytes.add((len - VNET_HEADER) as u64);
                }
                Sent::Later => {
                    *blocked = true;
                    return Ok(Verdict::Hold);
                }
                Sent::Never => metrics.tx_dropped.inc(),
            }
            limiter.charge((len - VNET_HEADER) as u64);
            Ok(Verdict::Used(0))
        })?;
        self.listen();
        Ok(())
    }

    /// Listens to what matters now.
    pub(super) fn listen(&mut self) {
        let (Some(active), Some(backend)) = (&self.active, &self.backend) else {
            return;
        };
        let mut wanted = Ready::empty();
        if !self.ended && self.wants_frames {
            wanted |= Ready::IN;
        }
        if self.tx_blocked {
            wanted |= Ready::OUT;
        }
        let wanted = Some(wanted).filter(|wanted| !wanted.is_empty());
        if wanted == self.registered {
            return;
        }
        let result = match (self.registered, wanted) {
            (None, Some(wanted)) => active.events.add(backend, BACKEND, wanted),
            (Some(_), Some(wanted)) => active.events.modify(backend, BACKEND, wanted),
            (_, None) => {
                active.events.remove(backend);
                Ok(())
            }
        };
        self.registered = wanted.filter(|_| result.is_ok());
    }
}

/// Puts a frame, with its header, into as many of the guest's chains as it takes.
fn deliver(
    active: &mut Activation,
    frame: &mut [u8],
    mergeable: bool,
) -> Result<Delivered, DeviceError> {
    let queue = active.queues.get_mut(RX).ok_or(DeviceError::NoQueue)?;
    let most = if mergeable { queue.size() } else { 1 };
    let mut chains: Vec<Chain> = Vec::new();
    let mut room = 0;
    while room < frame.len() && chains.len() < usize::from(most) {
        let Some(chain) = queue.next_chain(&active.memory)? else {
            // The driver is asked to ring for the next one before those in hand go back.
            if queue.enable_notification(&active.memory)? {
                continue;
            }
            for _ in &chains {
                queue.put_back();
            }
            return Ok(Delivered::Later);
        };
        let size = chain.writer(&active.memory).left();
        if size < VNET_HEADER {
            return Err(DeviceError::Protocol("a buffer has no room for a header"));
        }
        room += size;
        chains.push(chain);
    }
    if room < frame.len() {
        for _ in &chains {
            queue.put_back();
        }
        return Ok(Delivered::Never);
    }
    // There are at most as many chains as a queue has entries.
    frame[NUM_BUFFERS..VNET_HEADER].copy_from_slice(&(chains.len() as u16).to_le_bytes());
    let mut rest = &frame[..];
    for chain in &chains {
        let mut writer = chain.writer(&active.memory);
        let (piece, tail) = rest.split_at(rest.len().min(writer.left()));
        writer.write(piece)?;
        queue.finish(&active.memory, chain, writer.written())?;
        rest = tail;
    }
    Ok(Delivered::Yes)
}
