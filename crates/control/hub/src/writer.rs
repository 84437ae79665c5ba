//! Writing packs: pages become frames, frames are compressed by several threads, packs end at their limit.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use forkd_oci::digest::{Digest, Hasher};
use forkd_types::path_error;

use crate::error::HubError;
use crate::index::{Frame, Pack};
use crate::limits;
use crate::manifest::Role;
use crate::pages::PageHash;

/// Packing of frames. Level 9 saves 4 % and takes six times as long.
const LEVEL: i32 = 3;
/// Frames that are compressed together: 8 MiB of pages.
const BATCH: usize = 128;
const MAX_THREADS: usize = 8;

/// A pack that was written.
#[derive(Debug)]
pub struct NewPack {
    pub digest: Digest,
    pub bytes: u64,
    pub path: PathBuf,
}

/// The packs of one artifact.
pub struct Written {
    /// Every pack, in the order of its pages.
    pub packs: Vec<Pack>,
    /// Files of the packs that were written.
    pub files: Vec<NewPack>,
    /// Hashes of the pages, in the same order.
    pub hashes: Vec<PageHash>,
}

/// Writes packs into a folder.
pub struct Writer<'a> {
    folder: &'a Path,
    role: Role,
    frame: Vec<u8>,
    batch: Vec<Vec<u8>>,
    open: Option<Open>,
    pub packs: Vec<Pack>,
    pub files: Vec<NewPack>,
    pub hashes: Vec<PageHash>,
}

/// The pack that frames are appended to.
struct Open {
    path: PathBuf,
    file: File,
    hasher: Hasher,
    bytes: u64,
    frames: Vec<Frame>,
}

impl<'a> Writer<'a> {
    pub fn new(folder: &'a Path) -> Self {
        Self {
            folder,
            role: Role::Disk,
            frame: Vec::with_capacity(limits::FRAME),
            batch: Vec::new(),
            open: None,
            packs: Vec::new(),
            files: Vec::new(),
            hashes: Vec::new(),
        }
    }

    /// Later pages go to packs of this role.
    pub fn switch(&mut self, role: Role) -> Result<(), HubError> {
        if role != self.role {
            self.end_pack()?;
            self.role = role;
        }
        Ok(())
    }

    /// Stores a page and gives its number among the pages of this writer.
    pub fn page(&mut self, page: &[u8], hash: PageHash) -> Result<u32, HubError> {
        let number = u32::try_from(self.hashes.len())
            .ok()
            .filter(|number| u64::from(*number) < limits::PAGES);
        let number = number.ok_or_else(|| HubError::invalid("the snapshot has too many pages"))?;
        self.hashes.push(hash);
        self.frame.extend_from_slice(page);
        if self.frame.len() >= limits::FRAME {
            self.end_frame()?;
        }
        Ok(number)
    }

    pub fn finish(mut self) -> Result<Written, HubError> {
        self.end_pack()?;
        Ok(Written {
            packs: self.packs,
            files: self.files,
            hashes: self.hashes,
        })
    }

    fn end_frame(&mut self) -> Result<(), HubError> {
        if !self.frame.is_empty() {
            let next = Vec::with_capacity(limits::FRAME);
            self.batch.push(std::mem::replace(&mut self.frame, next));
        }
        if self.batch.len() >= BATCH {
            self.end_batch()?;
        }
        Ok(())
    }

    fn end_batch(&mut self) -> Result<(), HubError> {
        let batch = std::mem::take(&mut self.batch);
        for (packed, frame) in compress(&batch)? {
            self.append(&packed, frame)?;
        }
        Ok(())
    }

    fn append(&mut self, packed: &[u8], frame: Frame) -> Result<(), HubError> {
        let full = self.open.as_ref().is_some_and(|open| {
            open.bytes + packed.len() as u64 > limits::PACK || open.frames.len() >= limits::FRAMES
        });
        if full {
            self.close()?;
        }
        let open = match &mut self.open {
            Some(open) => open,
            none => none.insert(Open::create(self.folder, self.files.len())?),
        };
        open.file
            .write_all(packed)
            .map_err(path_error("write", &open.path))?;
        open.hasher.update(packed);
        open.bytes += packed.len() as u64;
        open.frames.push(frame);
        Ok(())
    }

    fn end_pack(&mut self) -> Result<(), HubError> {
        self.end_frame()?;
        self.end_batch()?;
        self.close()
    }

    fn close(&mut self) -> Result<(), HubError> {
        let Some(open) = self.open.take() else {
            return Ok(());
        };
        let digest = open.hasher.finish();
        self.packs.push(Pack {
            digest,
            bytes: open.bytes,
            role: self.role,
            frames: open.frames,
        });
        self.files.push(NewPack {
            digest,
            bytes: open.bytes,
            path: open.path,
        });
        Ok(())
    }
}

impl Open {
    fn create(folder: &Path, number: usize) -> Result<Self, HubError> {
        let path = folder.join(format!("pack-{number}"));
        let file = File::create(&path).map_err(path_error("create", &path))?;
        Ok(Self {
            path,
            file,
            hasher: Hasher::default(),
            bytes: 0,
            frames: Vec::new(),
        })
    }
}

/// Compresses frames by several threads and keeps their order.
fn compress(batch: &[Vec<u8>]) -> Result<Vec<(Vec<u8>, Frame)>, HubError> {
    let threads = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .clamp(1, MAX_THREADS);
    let share = batch.len().div_ceil(threads).max(1);
    let work = |frames: &[Vec<u8>]| -> std::io::Result<Vec<(Vec<u8>, Frame)>> {
        let mut compressor = zstd::bulk::Compressor::new(LEVEL)?;
        frames
            .iter()
            .map(|frame| {
                let packed = compressor.compress(frame)?;
                let about = Frame {
                    packed: packed.len() as u32,
                    pages: (frame.len() / limits::PAGE) as u8,
                    hash: *blake3::hash(frame).as_bytes(),
                };
                Ok((packed, about))
            })
            .collect()
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = batch
            .chunks(share)
            .map(|frames| scope.spawn(move || work(frames)))
            .collect();
        let mut all = Vec::with_capacity(batch.len());
        for thread in running {
            let done = thread
                .join()
                .map_err(|_| std::io::Error::other("a compressing thread panicked"))
                .and_then(|done| done);
            all.extend(done.map_err(HubError::Stream)?);
        }
        Ok(all)
    })
}
