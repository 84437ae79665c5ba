//! A part of a file: a blob in a layout is a whole file, a blob in an archive a range of it.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// A range of a file.
#[derive(Debug, Clone)]
pub struct Part {
    pub file: Arc<File>,
    pub offset: u64,
    pub length: u64,
}

impl Part {
    /// A whole file.
    pub fn whole(file: File) -> io::Result<Self> {
        let length = file.metadata()?.len();
        Ok(Self {
            file: Arc::new(file),
            offset: 0,
            length,
        })
    }

    /// All bytes. The caller has looked at the length.
    pub fn read(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(self.length).map_err(io::Error::other)?];
        self.file.read_exact_at(&mut bytes, self.offset)?;
        Ok(bytes)
    }

    pub fn reader(&self) -> PartReader {
        PartReader {
            part: self.clone(),
            at: 0,
        }
    }
}

/// Reads a [`Part`] from its start.
#[derive(Debug)]
pub struct PartReader {
    part: Part,
    at: u64,
}

impl Read for PartReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.part.length - self.at).unwrap_or(usize::MAX);
        let want = buffer.len().min(left);
        let buffer = buffer.get_mut(..want).unwrap_or_default();
        let read = self.part.file.read_at(buffer, self.part.offset + self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}
