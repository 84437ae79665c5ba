//! Guest RAM: a reserved range of addresses, and the mapping over it.
//!
//! [`GuestRam::reserve`] takes address space without memory, so that KVM's memory slots can be set up early.
//! [`GuestRam::map_zero`] or [`GuestRam::map_image`] fills it once. An image is mapped private: pages that the
//! guest writes become anonymous copies, and the image files never change. Invariants:
//! - the range is never unmapped while the process lives, because KVM and devices hold its address;
//! - nothing in this process holds a reference into guest memory; access is by volatile copy or system call.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Mutex, OnceLock, PoisonError};

use forkd_sys::{PageRange, Pagemap, PagemapError};
use forkd_vmm_proto::PageMap;
use thiserror::Error;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use crate::{GuestMemory, PAGE_SIZE, PageSet, RamLayout, RamRegion};

const HUGE_PAGE: usize = 2 << 20;

/// Why guest memory is not what was asked for.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// No address space.
    #[error("cannot reserve {bytes} bytes of address space")]
    Reserve {
        bytes: u64,
        #[source]
        source: io::Error,
    },
    /// The range cannot be described to the devices.
    #[error("cannot describe guest memory")]
    Describe,
    /// Something is mapped already.
    #[error("guest memory is mapped already")]
    Mapped,
    /// The kernel refused a mapping.
    #[error("cannot map guest memory")]
    Map(#[source] io::Error),
    /// The image is for a VM of another size.
    #[error("the image has {found} pages, the VM has {expected}")]
    Size {
        /// Pages of the image.
        found: u64,
        /// Pages of the VM.
        expected: u64,
    },
    /// The index names another number of layers than were given.
    #[error("the page map names {named} layers, {given} were given")]
    Layers {
        /// In the map.
        named: u32,
        /// In the request.
        given: usize,
    },
    /// A layer is shorter than the index needs.
    #[error("layer {layer} has {found} bytes, {needed} are needed")]
    Truncated { layer: u32, found: u64, needed: u64 },
    /// A layer cannot be looked at.
    #[error("cannot look at layer {layer}")]
    Layer {
        layer: u32,
        #[source]
        source: io::Error,
    },
    /// A range is not RAM.
    #[error("{len} bytes at {guest:#x} are not all RAM")]
    Range {
        /// Guest physical address.
        guest: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Pages cannot be given back or brought in.
    #[error("the kernel refused the advice on guest memory")]
    Advise(#[source] io::Error),
    /// A file with pages cannot be read.
    #[error("cannot read pages back")]
    ReadBack(#[source] io::Error),
    /// This process may not look at its own page map.
    #[error("which pages were touched cannot be known without the page map of the process")]
    Unknown,
    /// The page map of the process cannot be read.
    #[error("cannot find out which pages changed")]
    Pagemap(#[from] PagemapError),
}

/// The files an image is made of and which page lies where in them.
#[derive(Debug)]
pub struct ImageLayers {
    map: PageMap,
    layers: Vec<OwnedFd>,
}

impl ImageLayers {
    /// Checks that the layers are there and long enough, so that no page of the guest lies beyond the
    /// end of a file.
    pub fn new(map: PageMap, layers: Vec<OwnedFd>) -> Result<Self, MemoryError> {
        if map.layers() as usize != layers.len() {
            return Err(MemoryError::Layers {
                named: map.layers(),
                given: layers.len(),
            });
        }
        for (number, file) in layers.iter().enumerate() {
            let layer = number as u32;
            let stat = rustix::fs::fstat(file).map_err(|e| MemoryError::Layer {
                layer,
                source: e.into(),
            })?;
            let found = u64::try_from(stat.st_size).unwrap_or(0);
            let needed = map.layer_pages(layer) * PAGE_SIZE;
            if found < needed {
                return Err(MemoryError::Truncated {
                    layer,
                    found,
                    needed,
                });
            }
        }
        Ok(Self { map, layers })
    }

    /// Which page lies where.
    pub fn map(&self) -> &PageMap {
        &self.map
    }

    pub fn layers(&self) -> &[OwnedFd] {
        &self.layers
    }

    /// The layer with the most extents, if it has page N at offset N pages throughout and is as long as memory.
    fn below_all(&self) -> Option<u32> {
        let mut counts = vec![0u32; self.layers.len()];
        for extent in self.map.extents() {
            *counts.get_mut(extent.layer as usize)? += 1;
        }
        let (layer, file) = (0..).zip(&self.layers).max_by_key(|(layer, _)| {
            let layer: u32 = *layer;
            counts.get(layer as usize).copied()
        })?;
        let extents = self.map.extents().iter();
        let mut own = extents.filter(|extent| extent.layer == layer);
        let whole = u64::from(self.map.pages()) * PAGE_SIZE;
        let stat = rustix::fs::fstat(file).ok()?;
        let long_enough = u64::try_from(stat.st_size).is_ok_and(|size| size >= whole);
        (long_enough && own.all(|extent| extent.first == extent.layer_first)).then_some(layer)
    }
}

#[derive(Debug)]
enum Backing {
    Anonymous,
    Image(ImageLayers),
}

/// The RAM of one VM.
///
/// The range is never given back while the process lives: KVM and the devices hold its address. One VM is
/// one process, so the end of the process is the end of the range.
#[derive(Debug)]
pub struct GuestRam {
    base: NonNull<u8>,
    layout: RamLayout,
    memory: GuestMemory,
    backing: OnceLock<Backing>,
    /// Pages given back since the last [`GuestRam::discarded_set`]; `None` until
    /// [`GuestRam::remember_discarded`].
    discarded: Mutex<Option<Discarded>>,
}

/// Pages given back. Bounded by the number of pages: a guest that gives back the same page repeatedly does
/// not make it grow.
#[derive(Debug, Default)]
struct Discarded {
    ranges: Vec<PageRange>,
    tidied: usize,
}

impl Discarded {
    fn push(&mut self, range: PageRange) {
        const SLACK: usize = 1024;
        self.ranges.push(range);
        if self.ranges.len() > 2 * self.tidied + SLACK {
            self.ranges = PageSet::new(std::mem::take(&mut self.ranges))
                .ranges()
                .to_vec();
            self.tidied = self.ranges.len();
        }
    }
}

// SAFETY: `base` is the address of a mapping that lives as long as the process; all access through it is
// by system calls or by vm-memory's volatile accessors, neither of which is bound to a thread.
unsafe impl Send for GuestRam {}
// SAFETY: as above; a mapping that is replaced while another thread looks at it changes what that thread
// reads, which is what guest memory does anyway, but never leaves an address without a mapping.
unsafe impl Sync for GuestRam {}

impl GuestRam {
    /// Reserves address space without any memory behind it.
    pub fn reserve(layout: RamLayout) -> Result<Self, MemoryError> {
        // Room to begin at a multiple of a huge page, so that the guest's huge pages can be the host's.
        let len = layout.bytes() as usize + HUGE_PAGE;
        // SAFETY: a new mapping at an address the kernel chooses; nothing can be overwritten.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        let base = NonNull::new(start.cast::<u8>())
            .filter(|p| p.as_ptr().cast() != libc::MAP_FAILED)
            .ok_or_else(|| MemoryError::Reserve {
                bytes: layout.bytes(),
                source: io::Error::last_os_error(),
            })?;
        let skip = base.as_ptr().align_offset(HUGE_PAGE);
        // SAFETY: the mapping is longer than what is used by a whole huge page, which is more than is
        // skipped.
        let base = unsafe { base.add(skip) };
        let memory = describe(base, layout)?;
        Ok(Self {
            base,
            layout,
            memory,
            backing: OnceLock::new(),
            discarded: Mutex::default(),
        })
    }

    /// Records the pages that [`GuestRam::discard`] gives back from now on, for
    /// [`GuestRam::discarded_set`]. A discarded page is not private any more, so the page map of the
    /// process cannot show that its content changed.
    pub fn remember_discarded(&self) {
        let mut slot = self
            .discarded
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        slot.get_or_insert_default();
    }

    pub(crate) fn take_discarded(&self) -> Vec<PageRange> {
        let mut slot = self
            .discarded
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        slot.as_mut()
            .map(|discarded| std::mem::take(discarded).ranges)
            .unwrap_or_default()
    }

    pub fn layout(&self) -> RamLayout {
        self.layout
    }

    /// Where a region lies in this process.
    pub fn host_address(&self, region: RamRegion) -> u64 {
        self.base.as_ptr() as u64 + region.offset
    }

    /// Access by guest physical address. Only valid to use once something is mapped.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// The image the memory was mapped from, if it was.
    pub fn image(&self) -> Option<&ImageLayers> {
        match self.backing.get()? {
            Backing::Image(image) => Some(image),
            Backing::Anonymous => None,
        }
    }

    /// Maps fresh zero pages, in huge pages where the host has them: a kernel that boots touches most of
    /// what it touches for the first time.
    pub fn map_zero(&self) -> Result<(), MemoryError> {
        self.require_reserved()?;
        self.map_fixed(0, self.layout.bytes(), None)?;
        // Without them it is only slower.
        let _ = self.advise(0, self.layout.bytes(), libc::MADV_HUGEPAGE);
        self.backing
            .set(Backing::Anonymous)
            .map_err(|_| MemoryError::Mapped)
    }

    /// Maps an image, copy-on-write.
    pub fn map_image(&self, image: ImageLayers) -> Result<(), MemoryError> {
        self.require_reserved()?;
        let (found, expected) = (image.map.pages(), self.layout.pages());
        if found != expected {
            return Err(MemoryError::Size {
                found: u64::from(found),
                expected: u64::from(expected),
            });
        }
        let covered: u64 = image.map.extents().iter().map(|e| u64::from(e.count)).sum();
        if covered < u64::from(expected) {
            self.map_fixed(0, self.layout.bytes(), None)?;
        }
        // The layer with the most extents is mapped once, below the others: each mapping costs time.
        let below = (covered >= u64::from(expected))
            .then(|| image.below_all())
            .flatten();
        if let Some(file) = below.and_then(|layer| image.layers.get(layer as usize)) {
            self.map_fixed(0, self.layout.bytes(), Some((file.as_fd(), 0)))?;
        }
        for extent in image.map.extents() {
            if below == Some(extent.layer) {
                continue;
            }
            let file = image
                .layers
                .get(extent.layer as usize)
                .ok_or(MemoryError::Layers {
                    named: extent.layer + 1,
                    given: image.layers.len(),
                })?;
            self.map_fixed(
                u64::from(extent.first) * PAGE_SIZE,
                u64::from(extent.count) * PAGE_SIZE,
                Some((file.as_fd(), u64::from(extent.layer_first) * PAGE_SIZE)),
            )?;
        }
        self.backing
            .set(Backing::Image(image))
            .map_err(|_| MemoryError::Mapped)
    }

    fn require_reserved(&self) -> Result<(), MemoryError> {
        match self.backing.get() {
            None => Ok(()),
            Some(_) => Err(MemoryError::Mapped),
        }
    }

    pub(crate) fn map_fixed(
        &self,
        offset: u64,
        len: u64,
        file: Option<(BorrowedFd<'_>, u64)>,
    ) -> Result<(), MemoryError> {
        if offset
            .checked_add(len)
            .is_none_or(|end| end > self.layout.bytes())
        {
            return Err(MemoryError::Range { guest: offset, len });
        }
        let (fd, file_offset, kind) = match file {
            Some((file, at)) => (file.as_raw_fd(), at, 0),
            None => (-1, 0, libc::MAP_ANONYMOUS),
        };
        // SAFETY: the target lies inside the range this object has reserved, checked above, so only its
        // own pages are replaced. The guest sees them through vm-memory's volatile accessors.
        let at = unsafe {
            libc::mmap(
                self.base.as_ptr().add(offset as usize).cast(),
                len as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE | kind,
                fd,
                file_offset as libc::off_t,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(MemoryError::Map(io::Error::last_os_error()));
        }
        Ok(())
    }

    /// The private pages, by offset in RAM.
    pub fn private_pages(&self, pagemap: &Pagemap) -> Result<Vec<PageRange>, MemoryError> {
        Ok(pagemap.private_pages(self.base.as_ptr() as u64, self.layout.bytes())?)
    }

    /// The pages that have been touched at all, by offset in RAM.
    pub fn touched_pages(&self, pagemap: &Pagemap) -> Result<Vec<PageRange>, MemoryError> {
        Ok(pagemap.mapped_pages(self.base.as_ptr() as u64, self.layout.bytes())?)
    }

    /// Gives `len` bytes at a guest physical address back to the host. What the guest reads there
    /// afterwards is what the image holds, or zero.
    pub fn discard(&self, guest: u64, len: u64) -> Result<(), MemoryError> {
        let offset = self
            .layout
            .offset_of(guest, len)
            .filter(|o| o.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(PAGE_SIZE))
            .ok_or(MemoryError::Range { guest, len })?;
        self.advise(offset, len, libc::MADV_DONTNEED)?;
        let mut slot = self
            .discarded
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(discarded) = slot.as_mut() {
            discarded.push(PageRange {
                first: offset / PAGE_SIZE,
                count: len / PAGE_SIZE,
            });
        }
        Ok(())
    }

    /// Brings pages in: for writing (copied from the image at once) or for reading.
    pub fn populate(&self, range: PageRange, write: bool) -> Result<(), MemoryError> {
        let advice = if write {
            libc::MADV_POPULATE_WRITE
        } else {
            libc::MADV_POPULATE_READ
        };
        self.advise(
            range.first.saturating_mul(PAGE_SIZE),
            range.count.saturating_mul(PAGE_SIZE),
            advice,
        )
    }

    pub(crate) fn advise(
        &self,
        offset: u64,
        len: u64,
        advice: libc::c_int,
    ) -> Result<(), MemoryError> {
        if offset
            .checked_add(len)
            .is_none_or(|end| end > self.layout.bytes())
        {
            return Err(MemoryError::Range { guest: offset, len });
        }
        // SAFETY: the range is inside the reservation, checked above; nothing in this process holds a
        // reference into guest memory, so pages may change under it at any time as they do under a
        // running guest.
        let rc = unsafe {
            libc::madvise(
                self.base.as_ptr().add(offset as usize).cast(),
                len as usize,
                advice,
            )
        };
        if rc == 0 {
            Ok(())
        } else {
            Err(MemoryError::Advise(io::Error::last_os_error()))
        }
    }

    /// The start of RAM, for the forked writer, in which no vCPU and no device runs.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }
}

fn describe(base: NonNull<u8>, layout: RamLayout) -> Result<GuestMemory, MemoryError> {
    let mut regions = Vec::new();
    for region in layout.regions() {
        // SAFETY: the address and length are those of a part of a mapping that lives as long as the
        // process.
        let mapping = unsafe {
            MmapRegion::build_raw(
                base.as_ptr().add(region.offset as usize),
                region.len as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_NORESERVE,
            )
        }
        .map_err(|_| MemoryError::Describe)?;
        regions.push(
            GuestRegionMmap::new(mapping, GuestAddress(region.guest))
                .ok_or(MemoryError::Describe)?,
        );
    }
    GuestMemoryMmap::from_regions(regions).map_err(|_| MemoryError::Describe)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use forkd_vmm_proto::{Change, Extent};
    use vm_memory::Bytes;

    use super::*;

    fn layer(pages: &[(u64, u8)], len: u64) -> OwnedFd {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        for &(page, byte) in pages {
            file.write_all_at(&[byte; PAGE_SIZE as usize], page * PAGE_SIZE)
                .unwrap();
        }
        file.into()
    }

    fn ram() -> GuestRam {
        GuestRam::reserve(RamLayout::new(64).unwrap()).unwrap()
    }

    const BYTES: u64 = 64 << 20;

    fn byte_at(ram: &GuestRam, page: u64) -> u8 {
        ram.memory()
            .read_obj(GuestAddress(page * PAGE_SIZE + 17))
            .unwrap()
    }

    #[test]
    fn layers_show_where_the_map_says() {
        let extent = |first, count, layer| Extent {
            first,
            count,
            layer,
            layer_first: first,
        };
        let map = PageMap::new(
            (BYTES / PAGE_SIZE) as u32,
            2,
            vec![extent(0, 5, 0), extent(5, 2, 1), extent(7, 2, 0)],
        )
        .unwrap();
        let base = layer(&[(4, 4), (5, 4), (9, 4)], BYTES);
        let top = layer(&[(5, 8), (6, 8)], BYTES);
        let ram = ram();
        ram.map_image(ImageLayers::new(map, vec![base, top]).unwrap())
            .unwrap();
        assert_eq!(
            [3, 4, 5, 6, 7, 9].map(|p| byte_at(&ram, p)),
            [0, 4, 8, 8, 0, 0]
        );
    }

    #[test]
    fn the_layer_with_most_extents_is_mapped_below_the_others() {
        let pages = (BYTES / PAGE_SIZE) as u32;
        let changed = [(5, 2), (9, 1)].map(|(first, count)| Change { first, count });
        let map = PageMap::identity(pages).overlay(&changed).unwrap();
        let base = layer(&[(0, 4), (5, 4), (7, 4), (u64::from(pages) - 1, 4)], BYTES);
        let top = layer(&[(5, 8), (9, 8)], BYTES);
        let image = ImageLayers::new(map, vec![base, top]).unwrap();
        assert_eq!(image.below_all(), Some(0));
        let ram = ram();
        ram.map_image(image).unwrap();
        let last = u64::from(pages) - 1;
        assert_eq!(
            [0, 5, 6, 7, 9, last].map(|page| byte_at(&ram, page)),
            [4, 8, 0, 4, 8, 4]
        );
    }

    #[test]
    fn a_layer_with_pages_at_other_places_is_not_mapped_below() {
        let pages = (BYTES / PAGE_SIZE) as u32;
        let extent = |first, count, layer_first| Extent {
            first,
            count,
            layer: 0,
            layer_first,
        };
        let moved = vec![extent(0, 1, 1), extent(1, pages - 1, 0)];
        let map = PageMap::new(pages, 1, moved).unwrap();
        let image = ImageLayers::new(map, vec![layer(&[(0, 1), (1, 2)], BYTES)]).unwrap();
        assert_eq!(image.below_all(), None);
        let ram = ram();
        ram.map_image(image).unwrap();
        assert_eq!([0, 1].map(|page| byte_at(&ram, page)), [2, 1]);
    }

    #[test]
    fn writes_are_private_and_found() {
        let base = layer(&[(1, 1)], BYTES);
        let copy = base.try_clone().unwrap();
        let ram = ram();
        let map = PageMap::identity((BYTES / PAGE_SIZE) as u32);
        ram.map_image(ImageLayers::new(map, vec![base]).unwrap())
            .unwrap();
        assert_eq!(byte_at(&ram, 1), 1);
        ram.memory()
            .write_obj(9u8, GuestAddress(2 * PAGE_SIZE))
            .unwrap();
        let changed = ram.private_pages(&Pagemap::open().unwrap()).unwrap();
        assert_eq!(changed, [PageRange { first: 2, count: 1 }]);
        let mut byte = [1];
        std::fs::File::from(copy)
            .read_exact_at(&mut byte, 2 * PAGE_SIZE)
            .unwrap();
        assert_eq!(byte, [0]);
        ram.discard(2 * PAGE_SIZE, PAGE_SIZE).unwrap();
        assert_eq!(byte_at(&ram, 2), 0);
    }

    #[test]
    fn a_short_layer_is_refused() {
        let map = PageMap::identity((BYTES / PAGE_SIZE) as u32);
        let short = layer(&[], BYTES - PAGE_SIZE);
        assert!(matches!(
            ImageLayers::new(map, vec![short]),
            Err(MemoryError::Truncated { layer: 0, .. })
        ));
    }

    #[test]
    fn an_image_of_another_size_is_refused() {
        let extent = Extent {
            first: 0,
            count: 1,
            layer: 0,
            layer_first: 0,
        };
        let map = PageMap::new(77, 1, vec![extent]).unwrap();
        let image = ImageLayers::new(map, vec![layer(&[], BYTES)]).unwrap();
        assert!(matches!(
            ram().map_image(image),
            Err(MemoryError::Size { .. })
        ));
    }

    #[test]
    fn only_ram_can_be_given_back() {
        let ram = ram();
        ram.map_zero().unwrap();
        assert!(ram.discard(BYTES, PAGE_SIZE).is_err());
        assert!(ram.discard(1, PAGE_SIZE).is_err());
        assert!(ram.discard(u64::MAX - 4095, PAGE_SIZE).is_err());
        assert!(ram.map_zero().is_err());
    }
}
