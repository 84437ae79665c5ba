//! The flat index of a memory image: which layer holds which page.
//!
//! ```text
//!   8  magic "FORKDPGM"
//!   4  version            4  number of layers
//!   4  pages of memory    4  number of extents
//!  16  an extent: first page, count, layer, first page in the layer      (repeated)
//!   4  CRC-32 of all that comes before
//! ```
//!
//! All numbers are little-endian. Extents are in order and do not overlap; a page in none of them is zero.

use thiserror::Error;

const MAGIC: &[u8; 8] = b"FORKDPGM";
const VERSION: u32 = 1;
const HEADER: usize = 24;
const EXTENT: usize = 16;

/// The most extents an index may have: each one costs every child of the snapshot a mapping.
pub const MAX_EXTENTS: usize = 32 * 1024;
/// The most layers an index may name.
pub const MAX_LAYERS: u32 = 48;

/// Pages `first..first + count` of guest memory lie in `layer`, from its page `layer_first` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The first page in guest memory.
    pub first: u32,
    /// How many pages.
    pub count: u32,
    pub layer: u32,
    /// The first page in the layer.
    pub layer_first: u32,
}

/// Where each page of guest memory comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageMap {
    pages: u32,
    layers: u32,
    extents: Vec<Extent>,
}

/// A run of pages that a new layer holds, at the same place as in guest memory. Those that became zero are
/// holes of the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// The first page.
    pub first: u32,
    /// How many pages.
    pub count: u32,
}

/// Why bytes are not a page map.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PageMapError {
    /// The magic is missing.
    #[error("not a page map")]
    Magic,
    /// Another version wrote it.
    #[error("page map version {found} is not {VERSION}")]
    Version {
        /// The version it names.
        found: u32,
    },
    /// Its length does not fit what it says.
    #[error("the page map is cut off or too long")]
    Length,
    /// The checksum does not fit.
    #[error("the page map is damaged")]
    Checksum,
    /// An extent is empty, out of order, out of range or names a layer that is not there.
    #[error("extent {number} of the page map is out of order or out of range")]
    Extent { number: usize },
    /// There are too many extents or layers.
    #[error("the page map has {extents} extents over {layers} layers, more than the limit")]
    TooLarge {
        /// Number of extents.
        extents: usize,
        /// Number of layers.
        layers: u32,
    },
}

impl Extent {
    fn end(self) -> u64 {
        u64::from(self.first) + u64::from(self.count)
    }
}

impl PageMap {
    /// One layer that holds page N at its page N.
    pub fn identity(pages: u32) -> Self {
        let extents = match pages {
            0 => Vec::new(),
            count => vec![Extent {
                first: 0,
                count,
                layer: 0,
                layer_first: 0,
            }],
        };
        Self {
            pages,
            layers: 1,
            extents,
        }
    }

    /// Checks what is given.
    pub fn new(pages: u32, layers: u32, extents: Vec<Extent>) -> Result<Self, PageMapError> {
        if extents.len() > MAX_EXTENTS || layers > MAX_LAYERS {
            return Err(PageMapError::TooLarge {
                extents: extents.len(),
                layers,
            });
        }
        let mut after = 0u64;
        for (number, extent) in extents.iter().enumerate() {
            let fits = extent.count > 0
                && u64::from(extent.first) >= after
                && extent.end() <= u64::from(pages)
                && extent.layer < layers
                && extent.layer_first.checked_add(extent.count).is_some();
            if !fits {
                return Err(PageMapError::Extent { number });
            }
            after = extent.end();
        }
        Ok(Self {
            pages,
            layers,
            extents,
        })
    }

    /// Pages of guest memory.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// How many layers it names.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// The extents in order.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// How many pages of a layer are looked at; the layer must be at least that long.
    pub fn layer_pages(&self, layer: u32) -> u64 {
        self.extents
            .iter()
            .filter(|e| e.layer == layer)
            .map(|e| u64::from(e.layer_first) + u64::from(e.count))
            .max()
            .unwrap_or(0)
    }

    /// A map of the same layers in which every page is zero, for a layer that holds all of memory.
    pub fn emptied(&self) -> Self {
        Self {
            pages: self.pages,
            layers: self.layers,
            extents: Vec::new(),
        }
    }

    /// The map after `changes`, which are in order and do not overlap, with one more layer that holds
    /// the changed pages.
    pub fn overlay(&self, changes: &[Change]) -> Result<Self, PageMapError> {
        let layer = self.layers;
        let mut out = Vec::with_capacity(self.extents.len() + changes.len());
        let mut old = self.extents.iter().copied().peekable();
        let mut rest: Option<Extent> = None;
        for change in changes {
            let (start, end) = (
                u64::from(change.first),
                u64::from(change.first) + u64::from(change.count),
            );
            while let Some(extent) = rest.take().or_else(|| old.next()) {
                if u64::from(extent.first) >= end {
                    rest = Some(extent);
                    break;
                }
                let (before, after) = split_around(extent, start, end);
                out.extend(before);
                if after.is_some() {
                    rest = after;
                    break;
                }
            }
            push_joined(
                &mut out,
                Extent {
                    first: change.first,
                    count: change.count,
                    layer,
                    layer_first: change.first,
                },
            );
        }
        out.extend(rest);
        out.extend(old);
        Self::new(self.pages, layer + 1, out)
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + self.extents.len() * EXTENT + 4);
        bytes.extend_from_slice(MAGIC);
        // The number of extents is checked against MAX_EXTENTS when the map is made.
        for number in [VERSION, self.layers, self.pages, self.extents.len() as u32] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        for extent in &self.extents {
            for number in [extent.first, extent.count, extent.layer, extent.layer_first] {
                bytes.extend_from_slice(&number.to_le_bytes());
            }
        }
        let sum = crc32fast::hash(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// From bytes that may be anything.
    pub fn decode(bytes: &[u8]) -> Result<Self, PageMapError> {
        if bytes.get(..8) != Some(MAGIC) {
            return Err(PageMapError::Magic);
        }
        let version = number(bytes, 8)?;
        if version != VERSION {
            return Err(PageMapError::Version { found: version });
        }
        let (layers, pages, count) = (number(bytes, 12)?, number(bytes, 16)?, number(bytes, 20)?);
        if count as usize > MAX_EXTENTS {
            return Err(PageMapError::TooLarge {
                extents: count as usize,
                layers,
            });
        }
        let body = HEADER + count as usize * EXTENT;
        if bytes.len() != body + 4 {
            return Err(PageMapError::Length);
        }
        if number(bytes, body)? != crc32fast::hash(&bytes[..body]) {
            return Err(PageMapError::Checksum);
        }
        let extents = (0..count as usize)
            .map(|n| {
                let at = HEADER + n * EXTENT;
                Ok(Extent {
                    first: number(bytes, at)?,
                    count: number(bytes, at + 4)?,
                    layer: number(bytes, at + 8)?,
                    layer_first: number(bytes, at + 12)?,
                })
            })
            .collect::<Result<Vec<_>, PageMapError>>()?;
        Self::new(pages, layers, extents)
    }

    /// The largest encoding a valid map can have.
    pub const fn max_encoded_len() -> usize {
        HEADER + MAX_EXTENTS * EXTENT + 4
    }
}

fn number(bytes: &[u8], at: usize) -> Result<u32, PageMapError> {
    bytes
        .get(at..at + 4)
        .and_then(|b| b.try_into().ok())
        .map(u32::from_le_bytes)
        .ok_or(PageMapError::Length)
}

/// The parts of an extent that lie before and after `start..end`.
fn split_around(extent: Extent, start: u64, end: u64) -> (Option<Extent>, Option<Extent>) {
    let first = u64::from(extent.first);
    let before = (first < start).then(|| Extent {
        count: (extent.end().min(start) - first) as u32,
        ..extent
    });
    let after = (extent.end() > end).then(|| {
        let skip = (end.max(first) - first) as u32;
        Extent {
            first: extent.first + skip,
            count: extent.count - skip,
            layer: extent.layer,
            layer_first: extent.layer_first + skip,
        }
    });
    (before, after)
}

fn push_joined(out: &mut Vec<Extent>, next: Extent) {
    match out.last_mut() {
        Some(last)
            if last.layer == next.layer
                && last.end() == u64::from(next.first)
                && last.layer_first + last.count == next.layer_first =>
        {
            last.count += next.count;
        }
        _ => out.push(next),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The same map as one entry a page.
    fn flat(map: &PageMap) -> Vec<Option<(u32, u32)>> {
        let mut pages = vec![None; map.pages() as usize];
        for e in map.extents() {
            for n in 0..e.count {
                pages[(e.first + n) as usize] = Some((e.layer, e.layer_first + n));
            }
        }
        pages
    }

    fn changes(pages: u32) -> impl Strategy<Value = Vec<Change>> {
        proptest::collection::vec(any::<bool>(), pages as usize).prop_map(|changed| {
            let mut out: Vec<Change> = Vec::new();
            for (page, _) in changed.iter().enumerate().filter(|(_, is)| **is) {
                let first = page as u32;
                match out.last_mut() {
                    Some(c) if c.first + c.count == first => c.count += 1,
                    _ => out.push(Change { first, count: 1 }),
                }
            }
            out
        })
    }

    proptest! {
        #[test]
        fn an_overlay_replaces_exactly_what_changed(first in changes(64), second in changes(64)) {
            let mut map = PageMap::identity(64);
            let mut model = flat(&map);
            for (layer, set) in [(1, &first), (2, &second)] {
                map = map.overlay(set).unwrap();
                for c in set {
                    for page in c.first..c.first + c.count {
                        model[page as usize] = Some((layer, page));
                    }
                }
                prop_assert_eq!(flat(&map), model.clone());
                prop_assert_eq!(&PageMap::decode(&map.encode()).unwrap(), &map);
            }
        }

        #[test]
        fn a_flipped_byte_is_refused(set in changes(32), at in any::<prop::sample::Index>(), bit in 0u8..8) {
            let mut bytes = PageMap::identity(32).overlay(&set).unwrap().encode();
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            prop_assert!(PageMap::decode(&bytes).is_err());
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = PageMap::decode(&bytes);
            let mut with_magic = MAGIC.to_vec();
            with_magic.extend(bytes);
            let _ = PageMap::decode(&with_magic);
        }
    }

    #[test]
    fn a_map_that_lies_is_refused() {
        let extent = |first, count, layer| Extent {
            first,
            count,
            layer,
            layer_first: first,
        };
        for extents in [
            vec![extent(0, 0, 0)],
            vec![extent(0, 9, 0)],
            vec![extent(0, 4, 1)],
            vec![extent(0, 4, 0), extent(3, 1, 0)],
            vec![extent(u32::MAX, 2, 0)],
        ] {
            assert!(PageMap::new(8, 1, extents).is_err());
        }
    }
}
