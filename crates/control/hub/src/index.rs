//! The page index: which page of which blob is which stored page.
//!
//! ```text
//!   "forkdidx"  u32 version
//!   u32 packs   { sha256[32]  u64 bytes  u32 frames  u8 role }
//!               { u32 packed bytes  u8 pages - 1  blake3[32] of the unpacked frame }     for each frame of each pack
//!   u32 blobs   { b3[32]  u64 bytes  u32 extents  { u32 page  u32 count  u32 stored } }
//! ```
//!
//! Numbers are little-endian, and zstd packs all of it. Stored pages are numbered through all packs, in order. Extents
//! of a blob are sorted and do not overlap; pages that no extent names are zero. The last page of a blob is stored
//! whole, with zeros behind its end.

use forkd_oci::digest::Digest as Sha256;
use forkd_types::Digest;

use crate::error::HubError;
use crate::limits;
use crate::manifest::{Role, bounded};

const MAGIC: &[u8; 8] = b"forkdidx";
/// The version of the index.
pub const VERSION: u32 = 1;
/// Packing of the index itself.
const LEVEL: i32 = 3;

/// A pack and its frames.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pack {
    pub digest: Sha256,
    pub bytes: u64,
    pub role: Role,
    pub frames: Vec<Frame>,
}

impl Pack {
    /// Stored pages in the pack.
    pub fn pages(&self) -> u32 {
        self.frames.iter().map(|frame| u32::from(frame.pages)).sum()
    }
}

/// Up to 16 pages that are packed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// Bytes of the packed frame.
    pub packed: u32,
    /// Number of pages, 1 to 16.
    pub pages: u8,
    /// BLAKE3 digest of the unpacked frame.
    pub hash: [u8; 32],
}

/// Consecutive pages of a blob that are consecutive stored pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub page: u32,
    pub count: u32,
    pub stored: u32,
}

/// A blob as a list of stored pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlobMap {
    pub digest: Digest,
    pub bytes: u64,
    pub extents: Vec<Extent>,
}

impl BlobMap {
    /// Pages that are not zero.
    pub fn stored_pages(&self) -> u64 {
        self.extents.iter().map(|e| u64::from(e.count)).sum()
    }
}

/// The page index of an artifact.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PageIndex {
    pub packs: Vec<Pack>,
    pub blobs: Vec<BlobMap>,
}

impl PageIndex {
    /// Stored pages of all packs.
    pub fn pages(&self) -> u64 {
        self.packs.iter().map(|pack| u64::from(pack.pages())).sum()
    }

    /// The index as it is stored.
    pub fn encode(&self) -> Result<Vec<u8>, HubError> {
        let mut out = Vec::new();
        out.extend_from_slice(MAGIC);
        put(&mut out, VERSION);
        put(&mut out, self.packs.len() as u32);
        for pack in &self.packs {
            out.extend_from_slice(&pack.digest.bytes());
            out.extend_from_slice(&pack.bytes.to_le_bytes());
            put(&mut out, pack.frames.len() as u32);
            out.push(u8::from(pack.role == Role::Memory));
        }
        for frame in self.packs.iter().flat_map(|pack| &pack.frames) {
            put(&mut out, frame.packed);
            out.push(frame.pages.saturating_sub(1));
            out.extend_from_slice(&frame.hash);
        }
        put(&mut out, self.blobs.len() as u32);
        for blob in &self.blobs {
            out.extend_from_slice(&blob.digest.0);
            out.extend_from_slice(&blob.bytes.to_le_bytes());
            put(&mut out, blob.extents.len() as u32);
            for extent in &blob.extents {
                put(&mut out, extent.page);
                put(&mut out, extent.count);
                put(&mut out, extent.stored);
            }
        }
        zstd::bulk::compress(&out, LEVEL).map_err(HubError::Stream)
    }

    /// Reads an index and checks every number in it.
    pub fn decode(packed: &[u8]) -> Result<Self, HubError> {
        let bytes = unpack(packed)?;
        let mut input = Input { bytes: &bytes };
        if input.take(8)? != MAGIC {
            return Err(HubError::invalid("the page index has another magic"));
        }
        let version = input.u32()?;
        if version != VERSION {
            return Err(HubError::Version {
                what: "a page index of version",
                found: version.to_string(),
                known: VERSION.to_string(),
            });
        }
        let packs = read_packs(&mut input)?;
        let index = Self {
            blobs: read_blobs(&mut input, packs.iter().map(|p| u64::from(p.pages())).sum())?,
            packs,
        };
        if !input.bytes.is_empty() {
            return Err(HubError::invalid("the page index has bytes behind its end"));
        }
        Ok(index)
    }
}

/// Unpacks the index in steps: its length is not known, and a small file may unpack to anything.
fn unpack(packed: &[u8]) -> Result<Vec<u8>, HubError> {
    use std::io::Read;
    let bad = |_| HubError::invalid("the page index cannot be unpacked");
    let decoder = zstd::stream::read::Decoder::with_buffer(packed).map_err(bad)?;
    let mut bytes = Vec::new();
    let read = decoder.take(limits::INDEX + 1).read_to_end(&mut bytes);
    read.map_err(bad)?;
    bounded("bytes of page index", bytes.len() as u64, limits::INDEX)?;
    Ok(bytes)
}

fn read_packs(input: &mut Input<'_>) -> Result<Vec<Pack>, HubError> {
    let count = input.count(45, limits::PACKS as u64)?;
    let mut heads = Vec::with_capacity(count);
    for _ in 0..count {
        let digest = Sha256::from_bytes(input.array()?);
        let (bytes, frames) = (input.u64()?, input.u32()? as usize);
        let role = match input.u8()? {
            0 => Role::Disk,
            1 => Role::Memory,
            _ => return Err(HubError::invalid("a pack has an unknown role")),
        };
        heads.push((digest, bytes, frames, role));
    }
    let mut packs = Vec::with_capacity(count);
    let mut pages = 0;
    for (digest, bytes, frames, role) in heads {
        bounded("frames in a pack", frames as u64, limits::FRAMES as u64)?;
        input.has(frames, 37)?;
        let mut pack = Pack {
            digest,
            bytes,
            role,
            frames: Vec::with_capacity(frames),
        };
        for _ in 0..frames {
            let packed = input.u32()?;
            let pages = input.u8()?.saturating_add(1);
            let hash = input.array()?;
            if packed == 0
                || packed > limits::PACKED_FRAME
                || usize::from(pages) > limits::FRAME_PAGES
            {
                return Err(HubError::invalid("a frame has a length out of range"));
            }
            pack.frames.push(Frame {
                packed,
                pages,
                hash,
            });
        }
        let sum: u64 = pack.frames.iter().map(|f| u64::from(f.packed)).sum();
        if sum != bytes || bytes > limits::PACK {
            return Err(HubError::invalid("the frames of a pack do not fill it"));
        }
        pages += u64::from(pack.pages());
        packs.push(pack);
    }
    bounded("stored pages", pages, limits::PAGES)?;
    Ok(packs)
}

fn read_blobs(input: &mut Input<'_>, stored: u64) -> Result<Vec<BlobMap>, HubError> {
    let count = input.count(44, limits::BLOBS as u64)?;
    let mut blobs: Vec<BlobMap> = Vec::with_capacity(count);
    for _ in 0..count {
        let digest = Digest(input.array()?);
        let bytes = input.u64()?;
        bounded("bytes in a blob", bytes, limits::BLOB)?;
        let pages = bytes.div_ceil(limits::PAGE as u64);
        let extents = input.u32()? as usize;
        input.has(extents, 12)?;
        let mut blob = BlobMap {
            digest,
            bytes,
            extents: Vec::with_capacity(extents),
        };
        let mut end = 0;
        for _ in 0..extents {
            let extent = Extent {
                page: input.u32()?,
                count: input.u32()?,
                stored: input.u32()?,
            };
            let last = u64::from(extent.page) + u64::from(extent.count);
            let in_order = u64::from(extent.page) >= end && extent.count > 0;
            let inside =
                last <= pages && u64::from(extent.stored) + u64::from(extent.count) <= stored;
            if !in_order || !inside {
                return Err(HubError::invalid(
                    "an extent of the page index overlaps another or leaves its blob",
                ));
            }
            end = last;
            blob.extents.push(extent);
        }
        blobs.push(blob);
    }
    let unpacked = blobs.iter().map(BlobMap::stored_pages).sum();
    bounded("pages", unpacked, limits::PAGES)?;
    Ok(blobs)
}

fn put(out: &mut Vec<u8>, number: u32) {
    out.extend_from_slice(&number.to_le_bytes());
}

/// Bytes that are read from the front.
struct Input<'a> {
    bytes: &'a [u8],
}

impl<'a> Input<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], HubError> {
        let (taken, rest) = self
            .bytes
            .split_at_checked(count)
            .ok_or_else(|| HubError::invalid("the page index is cut off"))?;
        self.bytes = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], HubError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn u8(&mut self) -> Result<u8, HubError> {
        Ok(self.array::<1>()?[0])
    }

    fn u32(&mut self) -> Result<u32, HubError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, HubError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A count of records, checked against a limit and against the bytes that are left.
    fn count(&mut self, record: usize, limit: u64) -> Result<usize, HubError> {
        let count = self.u32()?;
        bounded("records", u64::from(count), limit)?;
        self.has(count as usize, record)?;
        Ok(count as usize)
    }

    /// Refuses a count of records that the bytes cannot hold, before memory is taken for them.
    fn has(&self, count: usize, record: usize) -> Result<(), HubError> {
        if count > self.bytes.len() / record {
            return Err(HubError::invalid("the page index is cut off"));
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub fn example() -> PageIndex {
        let frame = |n: u8, pages| Frame {
            packed: 100,
            pages,
            hash: [n; 32],
        };
        PageIndex {
            packs: vec![
                Pack {
                    digest: Sha256::of(b"a"),
                    bytes: 200,
                    role: Role::Disk,
                    frames: vec![frame(1, 16), frame(2, 3)],
                },
                Pack {
                    digest: Sha256::of(b"b"),
                    bytes: 100,
                    role: Role::Memory,
                    frames: vec![frame(3, 1)],
                },
            ],
            blobs: vec![
                BlobMap {
                    digest: Digest([1; 32]),
                    bytes: 100 * 4096,
                    extents: vec![
                        Extent {
                            page: 0,
                            count: 19,
                            stored: 0,
                        },
                        Extent {
                            page: 50,
                            count: 2,
                            stored: 18,
                        },
                    ],
                },
                BlobMap {
                    digest: Digest([2; 32]),
                    bytes: 5000,
                    extents: vec![Extent {
                        page: 1,
                        count: 1,
                        stored: 19,
                    }],
                },
            ],
        }
    }

    #[test]
    fn an_index_is_read_as_it_was_written() {
        let index = example();
        assert_eq!(index.pages(), 20);
        assert_eq!(PageIndex::decode(&index.encode().unwrap()).unwrap(), index);
        let empty = PageIndex::default();
        assert_eq!(PageIndex::decode(&empty.encode().unwrap()).unwrap(), empty);
    }

    #[test]
    fn a_hostile_index_is_refused() {
        let refused = |change: &dyn Fn(&mut PageIndex)| {
            let mut bad = example();
            change(&mut bad);
            let error = PageIndex::decode(&bad.encode().unwrap()).unwrap_err();
            assert_eq!(error.kind(), crate::Kind::Invalid, "{error}");
        };
        refused(&|i| i.packs[0].bytes = 201);
        refused(&|i| i.packs[0].frames[0].packed = limits::PACKED_FRAME + 1);
        refused(&|i| i.packs[0].frames[0].packed = 0);
        refused(&|i| i.packs[0].frames[0].pages = 17);
        refused(&|i| i.blobs[0].extents[1].page = 18);
        refused(&|i| i.blobs[0].extents[1].page = 99);
        refused(&|i| i.blobs[0].extents[1].count = 0);
        refused(&|i| i.blobs[0].extents[1].count = u32::MAX);
        refused(&|i| i.blobs[0].extents[1].stored = u32::MAX);
        refused(&|i| i.blobs[0].bytes = limits::BLOB + 1);
        refused(&|i| i.blobs.resize(limits::BLOBS + 1, i.blobs[1].clone()));
    }

    #[test]
    fn counts_beyond_the_file_take_no_memory() {
        let mut bytes = MAGIC.to_vec();
        put(&mut bytes, VERSION);
        put(&mut bytes, u32::MAX);
        let packed = zstd::bulk::compress(&bytes, 1).unwrap();
        assert!(PageIndex::decode(&packed).is_err());
        // A bomb: 300 MiB of zeros in a few KiB.
        let bomb = zstd::bulk::compress(&vec![0; 300 << 20], 1).unwrap();
        assert!(PageIndex::decode(&bomb).is_err());
        assert!(PageIndex::decode(b"").is_err());
    }

    proptest! {
        #[test]
        fn changed_bytes_never_panic(at in 0usize..600, byte: u8) {
            let plain = unpack(&example().encode().unwrap()).unwrap();
            let mut bytes = plain;
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = PageIndex::decode(&zstd::bulk::compress(&bytes, 1).unwrap());
        }
    }
}
