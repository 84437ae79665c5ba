//! Storage of a block device.
//!
//! A disk is a raw image ([`RawDisk`]), or a shared read-only image below a stack of thin layers of which only
//! the top one is written ([`LayeredDisk`]). All calls are synchronous and come from the disk thread, or from
//! the control thread while the disk thread is stopped.

mod empty;
mod layer;
mod layered;
mod map;
mod raw;

use std::fs::File;
use std::io;

use forkd_formats::layer::LayerError;
use thiserror::Error;

pub use empty::EmptyDisk;
pub use forkd_formats::layer::{BLOCK, LayerHeader, MAX_DISK, SECTOR};
pub use layer::Layer;
pub use layered::{DiskStack, LayeredDisk};
pub use raw::RawDisk;

/// Where a block device stores its data. Ranges are whole sectors inside the disk; calls block until done.
pub trait Disk: Send {
    /// Size in bytes, a multiple of [`SECTOR`].
    fn size(&self) -> u64;
    /// Whether writes are refused.
    fn read_only(&self) -> bool;
    /// Fills `data` from `offset`.
    fn read(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()>;
    /// Writes `data` at `offset`.
    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()>;
    /// Makes all writes durable.
    fn flush(&mut self) -> io::Result<()>;
    /// The range is not needed any more; its space is given back where possible.
    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()>;
    /// The range reads as zeroes from now on.
    fn write_zeroes(&mut self, offset: u64, len: u64) -> io::Result<()>;
    /// Does the fallible part of [`Disk::push_layer`], so that several disks get their layers or none does.
    fn prepare_layer(&mut self, layer: &File) -> Result<(), DiskError> {
        let _ = layer;
        Err(DiskError::NoLayers)
    }
    /// Freezes the top layer and writes into a new, empty one from now on.
    fn push_layer(&mut self, layer: File) -> Result<(), DiskError>;
    /// Whether nothing was written since the last layer was put on.
    fn untouched(&self) -> bool {
        false
    }
    /// The layers below the one that is written; `None` for a disk without layers.
    fn stack(&self) -> Option<DiskStack> {
        None
    }
    /// Returns to the content of an earlier [`Disk::stack`] of this disk, and writes into a new, empty layer.
    fn rewind(&mut self, stack: &DiskStack, layer: File) -> Result<(), DiskError> {
        let _ = (stack, layer);
        Err(DiskError::NoLayers)
    }
    /// Replaces all layers below the top one by a merged layer that reads the same.
    fn take_merged(&mut self, merged: File) -> Result<(), DiskError> {
        let _ = merged;
        Err(DiskError::NoLayers)
    }
    /// How much is stored where.
    fn stats(&self) -> DiskStats;
}

/// How much is stored where.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskStats {
    pub layers: u64,
    /// Bytes of data in the layer that is written.
    pub top_bytes: u64,
    /// Writes refused because that layer is full.
    pub refused: u64,
}

/// Why a disk cannot be opened or changed.
#[derive(Debug, Error)]
pub enum DiskError {
    /// A descriptor is not a regular file or block device.
    #[error("a disk image is not a file")]
    NotAFile,
    /// A system call failed.
    #[error("cannot {action} a disk image")]
    Io {
        action: &'static str,
        /// How it failed.
        #[source]
        source: io::Error,
    },
    /// Not a layer, or the size is not that of a disk.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The parts of a stack do not belong together.
    #[error("a disk layer of {layer} bytes does not fit a disk of {disk} bytes")]
    Mismatch {
        /// Size of the layer.
        layer: u64,
        /// Size of the rest.
        disk: u64,
    },
    /// A disk is attached where there is one already.
    #[error("the slot has a disk")]
    InUse,
    /// The disk has no layers.
    #[error("a disk that is written in place, or only read, takes no layer")]
    NoLayers,
    /// A new layer has data in it.
    #[error("a new disk layer is not empty")]
    NotEmpty,
}

impl DiskError {
    fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, source }
    }
}

/// Opens a disk: a raw image, written in place or only read, or layers over one, oldest first. An empty file without
/// layers is the place of a disk that is attached later.
pub fn open(base: File, layers: Vec<File>, read_only: bool) -> Result<Box<dyn Disk>, DiskError> {
    if layers.is_empty() {
        if !read_only && file_size(&base)? == 0 {
            return Ok(Box::new(EmptyDisk));
        }
        return Ok(Box::new(RawDisk::open(base, read_only)?));
    }
    let top = layers.len() - 1;
    let layers = layers
        .into_iter()
        .enumerate()
        .map(|(index, file)| Layer::open(file, index == top && !read_only))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(Box::new(LayeredDisk::new(base, layers, read_only)?))
}

/// Gives the space of a range back; the range reads as zeroes afterwards. False where the file system
/// cannot do that.
fn punch_hole(file: &File, offset: u64, len: u64) -> io::Result<bool> {
    use rustix::fs::FallocateFlags;
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(file, mode, offset, len) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Writes zeroes the slow way.
fn fill_with_zeroes(file: &File, offset: u64, len: u64) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    const ZEROES: &[u8] = &[0; 64 * 1024];
    let mut done = 0;
    while done < len {
        let count = (len - done).min(ZEROES.len() as u64);
        // `count` is at most the length of `ZEROES`.
        file.write_all_at(&ZEROES[..count as usize], offset + done)?;
        done += count;
    }
    Ok(())
}

/// Reads at `offset`; what lies past the end of the file is zero.
fn read_padded(file: &File, offset: u64, mut data: &mut [u8]) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    let mut at = offset;
    while !data.is_empty() {
        match file.read_at(data, at) {
            Ok(0) => {
                data.fill(0);
                return Ok(());
            }
            Ok(count) => {
                data = &mut data[count..];
                at += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The size of a file or block device.
fn file_size(file: &File) -> Result<u64, DiskError> {
    use std::os::unix::fs::FileTypeExt;
    let metadata = file.metadata().map_err(DiskError::io("look at"))?;
    if metadata.is_file() {
        return Ok(metadata.len());
    }
    if metadata.file_type().is_block_device() {
        return rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))
            .map_err(|errno| DiskError::io("measure")(errno.into()));
    }
    Err(DiskError::NotAFile)
}
