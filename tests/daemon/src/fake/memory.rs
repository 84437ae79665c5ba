//! A guest as pages of memory, and pages as layers and page maps.
//!
//! Page 0 holds a magic number and the length of the guest's encoding, which follows from page 1 on. All other pages
//! are zero. A cut of changed pages is computed by comparing with the image it builds on, so its layer and its page map have
//! the same form as those of `forkd-vmm`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use forkd_vmm_proto::{Change, PageMap};

use super::guest::Guest;

const PAGE: usize = forkd_types::PAGE_SIZE as usize;
const MAGIC: &[u8; 8] = b"FAKEMEM1";

type Page = Vec<u8>;

/// The pages that are not zero, by number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Pages(BTreeMap<u32, Page>);

impl Pages {
    /// The memory of a guest.
    pub fn of(guest: &Guest) -> io::Result<Self> {
        let body = postcard::to_stdvec(guest).map_err(io::Error::other)?;
        let mut head = MAGIC.to_vec();
        head.extend((body.len() as u64).to_le_bytes());
        head.resize(PAGE, 0);
        let rest = (1..).zip(body.chunks(PAGE)).map(|(number, chunk)| {
            let mut page = chunk.to_vec();
            page.resize(PAGE, 0);
            (number, page)
        });
        Ok(Self(std::iter::once((0, head)).chain(rest).collect()))
    }

    /// The guest in this memory.
    pub fn guest(&self) -> io::Result<Guest> {
        let bad = || io::Error::other("no guest in this memory");
        let head = self.0.get(&0).ok_or_else(bad)?;
        let len = body_len(head)?;
        let body: Vec<u8> = self
            .0
            .range(1..)
            .flat_map(|(_, page)| page.clone())
            .collect();
        postcard::from_bytes(body.get(..len).ok_or_else(bad)?).map_err(io::Error::other)
    }

    fn changes_since(&self, before: &Self) -> Vec<Change> {
        let mut changed: Vec<u32> = self
            .0
            .iter()
            .filter(|(number, page)| before.0.get(number) != Some(page))
            .map(|(number, _)| *number)
            .collect();
        changed.extend(
            before
                .0
                .keys()
                .filter(|number| !self.0.contains_key(number)),
        );
        changed.sort_unstable();
        let mut runs: Vec<Change> = Vec::new();
        for page in changed {
            match runs.last_mut() {
                Some(run) if run.first + run.count == page => run.count += 1,
                _ => runs.push(Change {
                    first: page,
                    count: 1,
                }),
            }
        }
        runs
    }
}

/// A memory image: its pages, and where they lie in its layers.
#[derive(Debug, Clone)]
pub(super) struct Image {
    map: PageMap,
    pages: Pages,
}

impl Image {
    /// Reads the guest's pages of an image.
    pub fn read(map: PageMap, layers: &[File]) -> io::Result<Self> {
        let head = read_page(&map, layers, 0)?;
        let count = body_len(&head)?.div_ceil(PAGE);
        let mut pages = BTreeMap::from([(0, head)]);
        for number in (1..).take(count) {
            pages.insert(number, read_page(&map, layers, number)?);
        }
        Ok(Self {
            map,
            pages: Pages(pages),
        })
    }

    /// The guest in the image.
    pub fn guest(&self) -> io::Result<Guest> {
        self.pages.guest()
    }

    /// Writes all pages to a file of the guest's memory size. Returns the image and the number of pages.
    pub fn write_all(pages: Pages, memory_pages: u32, to: &File) -> io::Result<(Self, u64)> {
        to.set_len(u64::from(memory_pages) * PAGE as u64)?;
        for (number, page) in &pages.0 {
            to.write_all_at(page, u64::from(*number) * PAGE as u64)?;
        }
        let written = pages.0.len() as u64;
        let map = PageMap::identity(memory_pages);
        Ok((Self { map, pages }, written))
    }

    /// Writes the pages that differ from this image, and the page map over one more layer.
    pub fn write_changed(&self, pages: Pages, to: &File, index: &File) -> io::Result<(Self, u64)> {
        let changes = pages.changes_since(&self.pages);
        to.set_len(u64::from(self.map.pages()) * PAGE as u64)?;
        let mut written = 0;
        for change in &changes {
            for number in change.first..change.first + change.count {
                // A page that became zero stays a hole.
                if let Some(page) = pages.0.get(&number) {
                    to.write_all_at(page, u64::from(number) * PAGE as u64)?;
                    written += 1;
                }
            }
        }
        let map = self.map.overlay(&changes).map_err(io::Error::other)?;
        index.write_all_at(&map.encode(), 0)?;
        Ok((Self { map, pages }, written))
    }
}

fn body_len(head: &[u8]) -> io::Result<usize> {
    let number = head
        .get(8..16)
        .filter(|_| head.starts_with(MAGIC))
        .and_then(|bytes| bytes.try_into().ok())
        .map(u64::from_le_bytes);
    number
        .and_then(|len| usize::try_from(len).ok())
        .ok_or_else(|| io::Error::other("no guest in this memory"))
}

fn read_page(map: &PageMap, layers: &[File], number: u32) -> io::Result<Page> {
    let mut page = vec![0; PAGE];
    let extent = map
        .extents()
        .iter()
        .find(|extent| (extent.first..extent.first + extent.count).contains(&number));
    if let Some(extent) = extent {
        let layer = layers
            .get(extent.layer as usize)
            .ok_or_else(|| io::Error::other("the page map names a layer that is missing"))?;
        let at = extent.layer_first + (number - extent.first);
        layer.read_exact_at(&mut page, u64::from(at) * PAGE as u64)?;
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: u32 = 64;

    fn guest(files: &[(&str, usize)]) -> Guest {
        Guest {
            files: files
                .iter()
                .map(|(path, len)| ((*path).to_owned(), vec![7; *len]))
                .collect(),
            ..Guest::default()
        }
    }

    #[test]
    fn a_guest_survives_layers_of_changes() {
        let states = [
            guest(&[("/a", 9000)]),
            guest(&[("/a", 9000), ("/b", 30_000)]),
            guest(&[("/b", 10)]),
            guest(&[]),
        ];
        let file = || tempfile::tempfile().unwrap();
        let mut layers = vec![file()];
        let first = Pages::of(&states[0]).unwrap();
        let (mut image, _) = Image::write_all(first, MEMORY, &layers[0]).unwrap();
        for state in &states[1..] {
            let (layer, index) = (file(), file());
            let pages = Pages::of(state).unwrap();
            (image, _) = image.write_changed(pages, &layer, &index).unwrap();
            layers.push(layer);
            let mut map = Vec::new();
            io::Read::read_to_end(&mut &index, &mut map).unwrap();
            let map = PageMap::decode(&map).unwrap();
            let found = Image::read(map, &layers).unwrap().guest().unwrap();
            assert_eq!(found, *state);
        }
    }

    #[test]
    fn memory_without_a_guest_is_refused() {
        let empty = tempfile::tempfile().unwrap();
        empty.set_len(u64::from(MEMORY) * PAGE as u64).unwrap();
        assert!(Image::read(PageMap::identity(MEMORY), &[empty]).is_err());
    }
}
