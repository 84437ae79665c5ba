//! A disk of size zero: the place of a disk that is attached later.

use std::fs::File;
use std::io;

use super::{Disk, DiskError, DiskStats};

/// A disk without a sector. Every request of the guest is out of its range.
#[derive(Debug, Clone, Copy, Default)]
pub struct EmptyDisk;

impl Disk for EmptyDisk {
    fn size(&self) -> u64 {
        0
    }

    fn read_only(&self) -> bool {
        false
    }

    fn read(&mut self, _offset: u64, _data: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::InvalidInput.into())
    }

    fn write(&mut self, _offset: u64, _data: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::InvalidInput.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&mut self, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }

    fn write_zeroes(&mut self, _offset: u64, _len: u64) -> io::Result<()> {
        Err(io::ErrorKind::InvalidInput.into())
    }

    fn push_layer(&mut self, _layer: File) -> Result<(), DiskError> {
        Err(DiskError::NoLayers)
    }

    fn stats(&self) -> DiskStats {
        DiskStats::default()
    }
}
