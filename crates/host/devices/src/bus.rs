//! Address spaces: which device answers at which port or physical address.
//!
//! A [`Bus`] maps ranges to devices and is fixed once the shell is built, so lookups take no lock. An access that
//! no device answers reads as all ones and is dropped when written, as on real hardware.

use std::collections::BTreeMap;
use std::sync::Arc;

use thiserror::Error;

/// A device that answers reads and writes in a range. Called from vCPU threads.
pub trait BusDevice: Send + Sync {
    /// Fills `data` with what is at `offset` from the start of the range.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Takes `data` written at `offset` from the start of the range.
    fn write(&self, offset: u64, data: &[u8]);
}

/// Why a range cannot be given out.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BusError {
    /// Empty, or past the end of the address space.
    #[error("the range {base:#x}+{len:#x} is not a range of addresses")]
    BadRange {
        base: u64,
        /// Number of addresses.
        len: u64,
    },
    /// Another device is there.
    #[error("the range {base:#x}+{len:#x} overlaps the one at {other:#x}")]
    Overlap {
        base: u64,
        /// Number of addresses.
        len: u64,
        /// First address of the device that is there.
        other: u64,
    },
}

struct Entry {
    len: u64,
    device: Arc<dyn BusDevice>,
}

/// An address space. Built once, then only read, so lookups take no lock.
#[derive(Default)]
pub struct Bus {
    entries: BTreeMap<u64, Entry>,
}

impl Bus {
    /// An address space with nothing in it.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives a range to a device.
    pub fn insert(
        &mut self,
        base: u64,
        len: u64,
        device: Arc<dyn BusDevice>,
    ) -> Result<(), BusError> {
        let end = base
            .checked_add(len)
            .filter(|_| len > 0)
            .ok_or(BusError::BadRange { base, len })?;
        if let Some((&other, _)) = self
            .entries
            .range(..end)
            .next_back()
            .filter(|(other, entry)| *other + entry.len > base)
        {
            return Err(BusError::Overlap { base, len, other });
        }
        self.entries.insert(base, Entry { len, device });
        Ok(())
    }

    fn find(&self, addr: u64, len: usize) -> Option<(u64, &dyn BusDevice)> {
        let (base, entry) = self.entries.range(..=addr).next_back()?;
        let offset = addr - base;
        let end = offset.checked_add(len as u64)?;
        (end <= entry.len).then(|| (offset, entry.device.as_ref()))
    }

    /// Reads. Returns false, with all bits one, where no device answers.
    pub fn read(&self, addr: u64, data: &mut [u8]) -> bool {
        match self.find(addr, data.len()) {
            Some((offset, device)) => {
                device.read(offset, data);
                true
            }
            None => {
                data.fill(0xff);
                false
            }
        }
    }

    /// Writes. Returns false where no device answers.
    pub fn write(&self, addr: u64, data: &[u8]) -> bool {
        match self.find(addr, data.len()) {
            Some((offset, device)) => {
                device.write(offset, data);
                true
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Recorder(Mutex<Vec<(u64, Vec<u8>)>>);

    impl BusDevice for Recorder {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(offset as u8);
        }
        fn write(&self, offset: u64, data: &[u8]) {
            self.0.lock().unwrap().push((offset, data.to_vec()));
        }
    }

    #[test]
    fn accesses_reach_the_device_with_its_offset() {
        let device = Arc::new(Recorder::default());
        let mut bus = Bus::new();
        bus.insert(0x100, 0x10, device.clone()).unwrap();
        assert!(bus.write(0x104, &[1, 2]));
        let mut data = [0; 4];
        assert!(bus.read(0x10c, &mut data));
        assert_eq!(data, [0xc; 4]);
        assert_eq!(*device.0.lock().unwrap(), [(4, vec![1, 2])]);
    }

    #[test]
    fn holes_read_as_ones() {
        let mut bus = Bus::new();
        bus.insert(0x100, 0x10, Arc::new(Recorder::default()))
            .unwrap();
        for addr in [0xff, 0x110, 0x10d, u64::MAX] {
            let mut data = [0; 4];
            assert!(!bus.read(addr, &mut data), "{addr:#x}");
            assert_eq!(data, [0xff; 4]);
            assert!(!bus.write(addr, &data));
        }
    }

    #[test]
    fn overlaps_are_refused() {
        let mut bus = Bus::new();
        let device = || Arc::new(Recorder::default());
        bus.insert(0x100, 0x10, device()).unwrap();
        for (base, len) in [
            (0x100, 1),
            (0x10f, 1),
            (0xff, 2),
            (0x80, 0x100),
            (0x108, 0x100),
        ] {
            let result = bus.insert(base, len, device());
            assert_eq!(
                result,
                Err(BusError::Overlap {
                    base,
                    len,
                    other: 0x100
                })
            );
        }
        bus.insert(0xf0, 0x10, device()).unwrap();
        bus.insert(0x110, 0x10, device()).unwrap();
        assert!(bus.insert(u64::MAX, 2, device()).is_err());
        assert!(bus.insert(0, 0, device()).is_err());
    }
}
