//! Unpacking: a stream of packs becomes the blobs of a snapshot.
//!
//! [`plan`] decides which packs are needed. [`unpack`] checks each frame by its BLAKE3 digest, and each pack by its
//! SHA-256 digest. Pages of packs that were left out come from [`Known`]. The caller compares the digest of every blob
//! before it uses the files. Work and memory are bounded by the length of the page index and by the pages that are written.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use forkd_types::path_error;

use crate::archive::{PackCheck, PackHead, StreamReader};
use crate::documents::Documents;
use crate::error::HubError;
use crate::index::Extent;
use crate::known::Known;
use crate::limits::{FRAME, PACKED_FRAME, PAGE};
use crate::pages::PageHash;

/// Which blobs are made, and which packs that takes.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Numbers of the blobs to make.
    pub blobs: Vec<usize>,
    /// For each pack, whether it must be sent.
    pub needed: Vec<bool>,
    /// Bytes of the needed packs.
    pub fetch_bytes: u64,
    /// Bytes that the new blobs take on disk.
    pub disk_bytes: u64,
}

/// The hashes of all pages that these blobs need; empty without page hashes.
pub fn wanted_pages(documents: &Documents, blobs: &[usize]) -> HashSet<PageHash> {
    let mut wanted = HashSet::new();
    let Some(hashes) = &documents.hashes else {
        return wanted;
    };
    for extent in extents_of(documents, blobs) {
        let pages = hashes.get(extent.stored as usize..(extent.stored + extent.count) as usize);
        wanted.extend(pages.unwrap_or_default());
    }
    wanted
}

fn extents_of<'a>(
    documents: &'a Documents,
    blobs: &'a [usize],
) -> impl Iterator<Item = &'a Extent> {
    let maps = blobs.iter().filter_map(|at| documents.index.blobs.get(*at));
    maps.flat_map(|map| map.extents.iter())
}

/// Decides which packs are needed to make these blobs.
pub fn plan(documents: &Documents, mut blobs: Vec<usize>, known: &Known) -> Plan {
    blobs.sort_unstable();
    blobs.dedup();
    // Pages that some blob needs and that are not known here.
    let mut open = vec![false; usize::try_from(documents.index.pages()).unwrap_or(0)];
    for extent in extents_of(documents, &blobs) {
        let range = extent.stored as usize..(extent.stored + extent.count) as usize;
        for at in range {
            let hash = documents.hashes.as_ref().and_then(|all| all.get(at));
            let missing = hash.is_none_or(|hash| !known.contains(hash));
            if let Some(open) = open.get_mut(at).filter(|_| missing) {
                *open = true;
            }
        }
    }
    let mut first = 0;
    let mut needed = Vec::with_capacity(documents.index.packs.len());
    let mut fetch_bytes = 0;
    for pack in &documents.index.packs {
        let end = first + pack.pages() as usize;
        let pages = open.get(first..end).unwrap_or_default();
        let wanted = pages.iter().any(|open| *open);
        needed.push(wanted);
        fetch_bytes += if wanted { pack.bytes } else { 0 };
        first = end;
    }
    let pages = |at: &usize| {
        let map = documents.index.blobs.get(*at);
        map.map_or(0, |map| map.stored_pages())
    };
    Plan {
        needed,
        fetch_bytes,
        disk_bytes: blobs.iter().map(pages).sum::<u64>() * PAGE as u64,
        blobs,
    }
}

/// A blob that was made, not yet compared with its digest.
#[derive(Debug)]
pub struct NewBlob {
    /// Number in the configuration.
    pub number: usize,
    pub path: PathBuf,
}

/// Makes the blobs of a plan as files in a folder.
pub fn unpack<R: Read>(
    documents: &Documents,
    plan: &Plan,
    known: &Known,
    reader: &mut StreamReader<R>,
    mut next: Option<PackHead>,
    folder: &Path,
    cancel: &AtomicBool,
) -> Result<Vec<NewBlob>, HubError> {
    let outputs = Outputs::create(documents, plan, folder)?;
    let mut arrived = vec![false; plan.needed.len()];
    while let Some(head) = next {
        let again = arrived
            .get_mut(head.number)
            .is_none_or(|arrived| std::mem::replace(arrived, true));
        if again {
            return Err(HubError::invalid("a pack was sent twice"));
        }
        receive(documents, &head, reader, &outputs, cancel)?;
        next = reader.next_pack(documents)?;
    }
    for (number, (needed, arrived)) in plan.needed.iter().zip(arrived).enumerate() {
        if !arrived {
            copy_known(documents, number, *needed, known, &outputs)?;
        }
    }
    Ok(outputs.files())
}

/// The files that are made, and where stored pages go in them.
struct Outputs {
    files: Vec<Output>,
}

struct Output {
    number: usize,
    bytes: u64,
    path: PathBuf,
    file: File,
    extents: Vec<Extent>,
}

impl Outputs {
    fn create(documents: &Documents, plan: &Plan, folder: &Path) -> Result<Self, HubError> {
        let mut files = Vec::with_capacity(plan.blobs.len());
        for number in &plan.blobs {
            let Some(map) = documents.index.blobs.get(*number) else {
                continue;
            };
            let path = folder.join(format!("blob-{number}"));
            let file = File::options()
                .read(true)
                .write(true)
                .create_new(true)
                .open(&path)
                .map_err(path_error("create", &path))?;
            file.set_len(map.bytes)
                .map_err(path_error("create", &path))?;
            files.push(Output {
                number: *number,
                bytes: map.bytes,
                path,
                file,
                extents: map.extents.clone(),
            });
        }
        Ok(Self { files })
    }

    /// The parts of all extents that lie in these stored pages, by their first stored page.
    fn parts(&self, first: u32, count: u32) -> Vec<Part> {
        let end = first + count;
        let mut parts = Vec::new();
        for (output, file) in self.files.iter().enumerate() {
            for extent in &file.extents {
                let from = extent.stored.max(first);
                let to = (extent.stored + extent.count).min(end);
                if from < to {
                    parts.push(Part {
                        stored: from,
                        count: to - from,
                        output,
                        page: extent.page + (from - extent.stored),
                    });
                }
            }
        }
        parts.sort_unstable_by_key(|part| part.stored);
        parts
    }

    /// Writes stored pages that lie side by side to a part of a file.
    fn write(&self, output: usize, page: u32, content: &[u8]) -> Result<(), HubError> {
        let Some(output) = self.files.get(output) else {
            return Ok(());
        };
        let offset = u64::from(page) * PAGE as u64;
        let room = usize::try_from(output.bytes.saturating_sub(offset)).unwrap_or(usize::MAX);
        let content = content.get(..content.len().min(room)).unwrap_or_default();
        let written = output.file.write_all_at(content, offset);
        Ok(written.map_err(path_error("write", &output.path))?)
    }

    fn files(self) -> Vec<NewBlob> {
        let blobs = self.files.into_iter().map(|file| NewBlob {
            number: file.number,
            path: file.path,
        });
        blobs.collect()
    }
}

/// Stored pages that go to consecutive pages of a file.
#[derive(Debug, Clone, Copy)]
struct Part {
    stored: u32,
    count: u32,
    output: usize,
    page: u32,
}

/// Receives one pack. Frames arrive in order, so the parts that a frame touches are found by one sweep.
fn receive<R: Read>(
    documents: &Documents,
    head: &PackHead,
    reader: &mut StreamReader<R>,
    outputs: &Outputs,
    cancel: &AtomicBool,
) -> Result<(), HubError> {
    let first = first_page(documents, head.number);
    let Some(pack) = documents.index.packs.get(head.number) else {
        return Ok(());
    };
    let parts = outputs.parts(first, pack.pages());
    let mut ahead = parts.iter().peekable();
    let mut active: Vec<Part> = Vec::new();
    let mut check = PackCheck::default();
    let mut unpacker = zstd::bulk::Decompressor::new().map_err(HubError::Stream)?;
    let (mut packed, mut plain) = (vec![0; PACKED_FRAME as usize], Vec::with_capacity(FRAME));
    let mut at = first;
    for frame in &pack.frames {
        if cancel.load(Ordering::Relaxed) {
            return Err(HubError::Cancelled);
        }
        let end = at + u32::from(frame.pages);
        let bytes = packed.get_mut(..frame.packed as usize).unwrap_or_default();
        reader.read_exact(bytes)?;
        check.update(bytes);
        active.retain(|part| part.stored + part.count > at);
        while let Some(part) = ahead.next_if(|part| part.stored < end) {
            active.push(*part);
        }
        if !active.is_empty() {
            open_frame(&mut unpacker, bytes, frame, &mut plain)?;
            for part in &active {
                let from = part.stored.max(at);
                let to = (part.stored + part.count).min(end);
                let range = (from - at) as usize * PAGE..(to - at) as usize * PAGE;
                let content = plain.get(range).unwrap_or_default();
                outputs.write(part.output, part.page + (from - part.stored), content)?;
            }
        }
        at = end;
    }
    check.finish(head)?;
    reader.end_pack(head);
    Ok(())
}

/// Unpacks a frame and compares it with its digest.
fn open_frame(
    unpacker: &mut zstd::bulk::Decompressor<'_>,
    packed: &[u8],
    frame: &crate::index::Frame,
    plain: &mut Vec<u8>,
) -> Result<(), HubError> {
    plain.clear();
    let unpacked = unpacker.decompress_to_buffer(packed, plain);
    let wrong = unpacked.is_err() || plain.len() != usize::from(frame.pages) * PAGE;
    if wrong || *blake3::hash(plain).as_bytes() != frame.hash {
        return Err(HubError::Digest {
            what: "a frame".into(),
            expected: forkd_types::Digest(frame.hash).to_string(),
            found: forkd_types::Digest(*blake3::hash(plain).as_bytes()).to_string(),
        });
    }
    Ok(())
}

fn first_page(documents: &Documents, pack: usize) -> u32 {
    let before = documents.index.packs.iter().take(pack);
    before.map(crate::index::Pack::pages).sum()
}

/// Fills the pages of a pack that was not sent.
fn copy_known(
    documents: &Documents,
    number: usize,
    needed: bool,
    known: &Known,
    outputs: &Outputs,
) -> Result<(), HubError> {
    let Some(pack) = documents.index.packs.get(number) else {
        return Ok(());
    };
    let missing = || HubError::MissingPack {
        digest: pack.digest,
    };
    let parts = outputs.parts(first_page(documents, number), pack.pages());
    if parts.is_empty() {
        return Ok(());
    }
    if needed {
        return Err(missing());
    }
    let hashes = documents.hashes.as_ref().ok_or_else(missing)?;
    let mut page = [0; PAGE];
    for part in parts {
        for at in 0..part.count {
            let hash = hashes
                .get((part.stored + at) as usize)
                .ok_or_else(missing)?;
            if !known.read(hash, &mut page).map_err(read_failed)? {
                return Err(missing());
            }
            outputs.write(part.output, part.page + at, &page)?;
        }
    }
    Ok(())
}

fn read_failed(error: io::Error) -> HubError {
    HubError::Stream(error)
}
