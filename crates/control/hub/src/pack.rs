//! Packing: the blobs of a snapshot become packs without duplicate pages.
//!
//! The first pass hashes every page and looks for secrets. The second pass stores the pages that neither the base nor an
//! earlier page has. The result depends on the content, the base and the version of zstd alone, so packing twice gives
//! the same packs.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::config::Blob;
use crate::error::HubError;
use crate::index::{BlobMap, Extent, Pack, PageIndex};
use crate::limits::PAGE;
use crate::manifest::Role;
use crate::pages::{PageHash, each_chunk, hash, read_page, used_pages};
use crate::secrets::{Found, Scanner};
pub use crate::writer::NewPack;
use crate::writer::{Writer, Written};

/// A reused pack must have at least one page in four in use.
const LEAST_USE: u64 = 4;

/// One blob to pack.
#[derive(Debug)]
pub struct Input {
    pub blob: Blob,
    pub file: File,
    pub role: Role,
}

/// Pages that the target has already: the index and the page hashes of an artifact there.
#[derive(Debug, Clone, Default)]
pub struct Base {
    pub packs: Vec<Pack>,
    pub hashes: Vec<PageHash>,
}

/// The result of packing.
#[derive(Debug)]
pub struct Packed {
    pub index: PageIndex,
    /// Hashes of all stored pages, in the order of the index.
    pub hashes: Vec<PageHash>,
    /// Packs that were written; those of the base are not among them.
    pub new: Vec<NewPack>,
    /// Keys and tokens in the pages.
    pub secrets: Vec<Found>,
    /// Pages that are not zero.
    pub pages: u64,
}

/// Packs blobs into files of a folder. Stops soon after `cancel` is set.
pub fn pack(
    inputs: &[Input],
    base: &Base,
    folder: &Path,
    cancel: &AtomicBool,
) -> Result<Packed, HubError> {
    let (all, secrets) = hash_all(inputs, cancel)?;
    let (kept, mut known) = reuse(base, &all);
    let reused: u32 = kept.iter().map(Pack::pages).sum();
    let mut writer = Writer::new(folder);
    let mut maps = Vec::with_capacity(inputs.len());
    let mut page = [0; PAGE];
    for (input, hashes) in inputs.iter().zip(&all) {
        writer.switch(input.role)?;
        let mut map = BlobMap {
            digest: input.blob.digest,
            bytes: input.blob.bytes,
            extents: Vec::new(),
        };
        for (number, hash) in hashes {
            let stored = match known.get(hash) {
                Some(stored) => *stored,
                None => {
                    cancelled(cancel)?;
                    read_page(&input.file, u64::from(*number), &mut page)
                        .map_err(HubError::Stream)?;
                    let stored = reused + writer.page(&page, *hash)?;
                    known.insert(*hash, stored);
                    stored
                }
            };
            append(&mut map.extents, *number, stored);
        }
        maps.push(map);
    }
    let pages = all.iter().map(|hashes| hashes.len() as u64).sum();
    let Written {
        packs,
        files: new,
        hashes,
    } = writer.finish()?;
    let mut all_hashes = kept_hashes(base, &kept);
    all_hashes.extend(hashes);
    Ok(Packed {
        index: PageIndex {
            packs: kept.into_iter().chain(packs).collect(),
            blobs: maps,
        },
        hashes: all_hashes,
        new,
        secrets,
        pages,
    })
}

/// The pages of a blob that are not zero, with their hashes.
type Hashes = Vec<(u32, PageHash)>;

fn hash_all(inputs: &[Input], cancel: &AtomicBool) -> Result<(Vec<Hashes>, Vec<Found>), HubError> {
    let mut scanner = Scanner::default();
    let mut all = Vec::with_capacity(inputs.len());
    for input in inputs {
        let mut hashes = Vec::new();
        scanner.begin(input.role);
        each_chunk(&input.file, |first, chunk| {
            if cancel.load(Ordering::Relaxed) {
                return Err(std::io::Error::from(std::io::ErrorKind::Interrupted));
            }
            scanner.feed(first, chunk);
            for (number, page) in used_pages(first, chunk) {
                hashes.push((u32::try_from(number).unwrap_or(u32::MAX), hash(page)));
            }
            Ok(())
        })
        .map_err(|error: std::io::Error| match error.kind() {
            std::io::ErrorKind::Interrupted => HubError::Cancelled,
            _ => HubError::Stream(error),
        })?;
        all.push(hashes);
    }
    Ok((all, scanner.finish()))
}

/// The packs of the base that are worth keeping, and the number of each of their pages.
fn reuse(base: &Base, all: &[Hashes]) -> (Vec<Pack>, HashMap<PageHash, u32>) {
    let mut known = HashMap::new();
    if base.packs.is_empty() {
        return (Vec::new(), known);
    }
    let wanted: HashSet<&PageHash> = all.iter().flatten().map(|(_, hash)| hash).collect();
    let mut kept = Vec::new();
    let mut taken: HashSet<&PageHash> = HashSet::new();
    let (mut at, mut stored) = (0, 0);
    for pack in &base.packs {
        let count = pack.pages();
        let hashes = base.hashes.get(at..at + count as usize).unwrap_or_default();
        at += count as usize;
        let fresh = |hash: &&PageHash| wanted.contains(hash) && !taken.contains(hash);
        let used = hashes.iter().filter(fresh).count() as u64;
        if used * LEAST_USE < u64::from(count) || used == 0 {
            continue;
        }
        for (slot, hash) in hashes.iter().enumerate() {
            known.entry(*hash).or_insert(stored + slot as u32);
            taken.insert(hash);
        }
        stored += count;
        kept.push(pack.clone());
    }
    (kept, known)
}

fn kept_hashes(base: &Base, kept: &[Pack]) -> Vec<PageHash> {
    let mut hashes = Vec::new();
    let mut at = 0;
    let mut kept = kept.iter().peekable();
    for pack in &base.packs {
        let count = pack.pages() as usize;
        if kept.next_if(|next| next.digest == pack.digest).is_some() {
            hashes.extend(base.hashes.get(at..at + count).unwrap_or_default());
        }
        at += count;
    }
    hashes
}

fn append(extents: &mut Vec<Extent>, page: u32, stored: u32) {
    if let Some(last) = extents.last_mut()
        && last.page + last.count == page
        && last.stored + last.count == stored
    {
        last.count += 1;
        return;
    }
    extents.push(Extent {
        page,
        count: 1,
        stored,
    });
}

fn cancelled(cancel: &AtomicBool) -> Result<(), HubError> {
    if cancel.load(Ordering::Relaxed) {
        return Err(HubError::Cancelled);
    }
    Ok(())
}
