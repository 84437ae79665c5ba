//! A raw image, written in place or read-only.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use forkd_formats::layer::LayerError;

use super::{
    Disk, DiskError, DiskStats, SECTOR, file_size, fill_with_zeroes, punch_hole, read_padded,
};

/// A raw image, written in place.
#[derive(Debug)]
pub struct RawDisk {
    file: File,
    size: u64,
    read_only: bool,
}

impl RawDisk {
    /// Opens an image. A last piece smaller than a sector does not belong to the disk.
    pub fn open(file: File, read_only: bool) -> Result<Self, DiskError> {
        let size = file_size(&file)? / SECTOR * SECTOR;
        if size == 0 {
            return Err(LayerError::Size { size }.into());
        }
        Ok(Self {
            file,
            size,
            read_only,
        })
    }
}

impl Disk for RawDisk {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn read(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        read_padded(&self.file, offset, data)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, offset)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        punch_hole(&self.file, offset, len).map(drop)
    }

    fn write_zeroes(&mut self, offset: u64, len: u64) -> io::Result<()> {
        if punch_hole(&self.file, offset, len)? {
            return Ok(());
        }
        fill_with_zeroes(&self.file, offset, len)
    }

    fn push_layer(&mut self, _layer: File) -> Result<(), DiskError> {
        Err(DiskError::NoLayers)
    }

    fn stats(&self) -> DiskStats {
        DiskStats::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_discarded_reads_zero() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 * 1024 + 100).unwrap();
        let mut disk = RawDisk::open(file, false).unwrap();
        assert_eq!(disk.size(), 64 * 1024);
        disk.write(4096, &[7; 8192]).unwrap();
        disk.flush().unwrap();
        disk.write_zeroes(4096, 4096).unwrap();
        let mut data = [1; 8192];
        disk.read(4096, &mut data).unwrap();
        assert!(data[..4096].iter().all(|b| *b == 0));
        assert!(data[4096..].iter().all(|b| *b == 7));
        disk.discard(8192, 4096).unwrap();
        disk.read(8192, &mut data).unwrap();
        assert!(data.iter().all(|b| *b == 0));
    }

    #[test]
    fn an_empty_file_and_a_pipe_are_no_disks() {
        assert!(RawDisk::open(tempfile::tempfile().unwrap(), false).is_err());
        let (reader, _writer) = std::io::pipe().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(reader));
        assert!(matches!(
            RawDisk::open(file, true),
            Err(DiskError::NotAFile)
        ));
    }
}
