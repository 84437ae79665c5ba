//! The socket device's work on the device thread: packets from the guest, and packets to it.

use super::Vsock;
use super::packet::{HEADER_LEN, Header, MAX_DATA};
use crate::virtio::{DeviceError, Verdict};

pub(super) const RX: usize = 0;
pub(super) const TX: usize = 1;

impl Vsock {
    /// Takes packets from the guest.
    pub(super) fn take_packets(&mut self) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let (muxer, buffer, held) = (&mut self.muxer, &mut self.buffer, &mut self.held);
        *held = false;
        active.drain(TX, |memory, chain| {
            if muxer.is_full() {
                *held = true;
                return Ok(Verdict::Hold);
            }
            let mut reader = chain.reader(memory);
            let header = Header::decode(&reader.array()?);
            let len = header.len as usize;
            if len > MAX_DATA || len > reader.left() {
                return Err(DeviceError::Protocol("a packet is shorter than it says"));
            }
            buffer.resize(len.max(buffer.len()), 0);
            reader.read(&mut buffer[..len])?;
            muxer.on_packet(&header, &buffer[..len]);
            Ok(Verdict::Used(0))
        })?;
        self.give_packets()
    }

    /// Gives packets to the guest.
    pub(super) fn give_packets(&mut self) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let (muxer, buffer) = (&mut self.muxer, &mut self.buffer);
        if muxer.has_output() {
            active.drain(RX, |memory, chain| {
                let mut writer = chain.writer(memory);
                let room = writer.left().saturating_sub(HEADER_LEN).min(MAX_DATA);
                if room == 0 {
                    return Err(DeviceError::Protocol("a buffer has no room for a packet"));
                }
                buffer.resize(room.max(buffer.len()), 0);
                let Some(header) = muxer.next_packet(&mut buffer[..room]) else {
                    return Ok(Verdict::Hold);
                };
                writer.write(&header.encode())?;
                writer.write(&buffer[..header.len as usize])?;
                Ok(Verdict::Used(writer.written()))
            })?;
        }
        if self.held && !self.muxer.is_full() {
            active.again(TX);
        }
        if !self.muxer.has_output() {
            self.buffer = Vec::new();
        }
        Ok(())
    }
}
