//! Reading a file at offsets, independent of its shared file position.
//!
//! Several VMMs may be given the same open file. The loader crate wants `Read` and `Seek`, so the position is
//! kept here.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use vm_memory::bitmap::BitmapSlice;
use vm_memory::{ReadVolatile, VolatileMemoryError, VolatileSlice};

const BUFFER: usize = 256 * 1024;

/// A file with a position of its own: the open file behind a descriptor that was handed in may be shared
/// with other processes, and its position with it.
pub(super) struct SharedFile<'a> {
    file: &'a File,
    at: u64,
    pub(super) size: u64,
    buffer: Vec<u8>,
}

impl<'a> SharedFile<'a> {
    pub(super) fn new(file: &'a File) -> io::Result<Self> {
        Ok(Self {
            file,
            at: 0,
            size: file.metadata()?.len(),
            buffer: vec![0; BUFFER],
        })
    }
}

impl Read for SharedFile<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.file.read_at(buffer, self.at)?;
        self.at += got as u64;
        Ok(got)
    }
}

impl Seek for SharedFile<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let target = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.size.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = target.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

impl ReadVolatile for SharedFile<'_> {
    fn read_volatile<B: BitmapSlice>(
        &mut self,
        target: &mut VolatileSlice<'_, B>,
    ) -> Result<usize, VolatileMemoryError> {
        // A caller that wants all of it does not ask twice, so fill what there is room for.
        let mut done = 0;
        while done < target.len() {
            let want = (target.len() - done).min(self.buffer.len());
            let Some(buffer) = self.buffer.get_mut(..want) else {
                break;
            };
            let got = self
                .file
                .read_at(buffer, self.at)
                .map_err(VolatileMemoryError::IOError)?;
            if got == 0 {
                break;
            }
            let place = target.subslice(done, got)?;
            place.copy_from(buffer.get(..got).unwrap_or_default());
            self.at += got as u64;
            done += got;
        }
        Ok(done)
    }
}
