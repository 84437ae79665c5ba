//! Pages that are on this host already: the files of snapshots that the caller may use.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;

use crate::limits::PAGE;
use crate::pages::{PageHash, each_chunk, hash, read_page, used_pages};

/// Pages by their hash, each with the file and the place that it was found at.
#[derive(Debug, Default)]
pub struct Known {
    files: Vec<File>,
    pages: HashMap<PageHash, (u32, u32)>,
}

impl Known {
    /// Looks for the wanted pages in files. Ends early when all are found.
    pub fn find(
        files: impl IntoIterator<Item = File>,
        wanted: &HashSet<PageHash>,
    ) -> io::Result<Self> {
        let mut known = Self::default();
        for file in files {
            if known.pages.len() >= wanted.len() {
                break;
            }
            let number = u32::try_from(known.files.len()).unwrap_or(u32::MAX);
            let pages = &mut known.pages;
            each_chunk(&file, |first, chunk| {
                for (page, content) in used_pages(first, chunk) {
                    let hash = hash(content);
                    if wanted.contains(&hash) {
                        let page = u32::try_from(page).unwrap_or(u32::MAX);
                        pages.entry(hash).or_insert((number, page));
                    }
                }
                io::Result::Ok(())
            })?;
            known.files.push(file);
        }
        Ok(known)
    }

    pub fn contains(&self, hash: &PageHash) -> bool {
        self.pages.contains_key(hash)
    }

    /// Reads a page. False if it is not known, or if the file has changed since.
    pub fn read(&self, wanted: &PageHash, buffer: &mut [u8; PAGE]) -> io::Result<bool> {
        let place = self.pages.get(wanted);
        let file = place.and_then(|(file, _)| self.files.get(*file as usize));
        let (Some((_, page)), Some(file)) = (place, file) else {
            return Ok(false);
        };
        read_page(file, u64::from(*page), buffer)?;
        Ok(hash(buffer) == *wanted)
    }
}
