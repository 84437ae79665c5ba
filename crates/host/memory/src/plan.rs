//! The choice of pages that a cut writes.
//!
//! - [`plan_full`]: everything that is not known to be zero.
//! - [`plan_changed`]: the changed pages, with small gaps filled, since each range costs every child a mapping.
//! - [`plan_onto`]: the changed pages, or everything once the page map would grow too large.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd;

use forkd_os::sparse::DataRanges;
use forkd_sys::PageRange;
use forkd_vmm_proto::{Change, MAX_EXTENTS, PageMap};

use crate::{ImageLayers, PAGE_SIZE};

/// Up to this many mappings per child cost nothing measurable.
const FEW_RANGES: usize = 64;
/// Upper bound on mappings per child; above it, gaps are filled regardless of their size.
const MANY_RANGES: usize = 1024;
/// Gaps may always add this many pages.
const SOME_PAGES: u64 = 256;
/// Gaps may add one page to this many changed ones. A page of a gap is brought in, copied and, for a tag, hashed and
/// written to disk. For a tag that takes three times as long as a mapping, unless the cut has many children.
const OWN_PER_GAP: u64 = 16;

/// The pages to look at, in order. Zero pages become holes of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WritePlan {
    /// Runs of pages, by offset in RAM.
    pub ranges: Vec<PageRange>,
}

impl WritePlan {
    /// How many pages are looked at.
    pub fn pages(&self) -> u64 {
        self.ranges.iter().map(|r| r.count).sum()
    }
}

/// All pages that are not known to be zero: data of the image, and private pages.
pub fn plan_full(private: Vec<PageRange>, image: Option<&ImageLayers>) -> WritePlan {
    let mut ranges = private;
    if let Some(image) = image {
        ranges.extend(image_data(image));
        ranges.sort_by_key(|r| r.first);
    }
    WritePlan {
        ranges: join(&ranges, 0),
    }
}

/// The private pages and the gaps between them. Each range costs every child of the cut a mapping, so the
/// smallest gaps are filled until few ranges are left or the gaps have too many pages.
pub fn plan_changed(private: Vec<PageRange>) -> WritePlan {
    let ranges = join(&private, 0);
    let own: u64 = ranges.iter().map(|range| range.count).sum();
    // Each gap with the number of the range after it.
    let mut gaps: Vec<(u64, usize)> = ranges
        .windows(2)
        .zip(1..)
        .map(|(pair, after)| (pair[1].first - pair[0].end(), after))
        .collect();
    gaps.sort_unstable();
    let (mut left, mut filled) = (ranges.len(), 0);
    let mut joined = vec![false; ranges.len()];
    for (gap, after) in gaps {
        let dear = filled + gap > (own / OWN_PER_GAP).max(SOME_PAGES);
        if left <= FEW_RANGES || (dear && left <= MANY_RANGES) {
            break;
        }
        filled += gap;
        left -= 1;
        joined[after] = true;
    }
    let mut out: Vec<PageRange> = Vec::with_capacity(left);
    for (range, joined) in ranges.into_iter().zip(joined) {
        match out.last_mut() {
            Some(last) if joined => last.count = range.end() - last.first,
            _ => out.push(range),
        }
    }
    WritePlan { ranges: out }
}

/// The pages of a cut onto `map`, and the map that the new layer goes on: `changed`, unless the new map would
/// have more extents than are allowed. Then the layer holds `all` pages that are not zero, and the map
/// below it is empty.
pub fn plan_onto<E>(
    map: PageMap,
    changed: Vec<PageRange>,
    all: impl FnOnce() -> Result<Vec<PageRange>, E>,
) -> Result<(WritePlan, PageMap), E> {
    let plan = plan_changed(changed);
    if fits(&map, &plan) {
        return Ok((plan, map));
    }
    let mut ranges = all()?;
    ranges.sort_by_key(|range| range.first);
    let mut ranges = join(&ranges, 0);
    if ranges.len() > MAX_EXTENTS {
        ranges = vec![PageRange {
            first: 0,
            count: u64::from(map.pages()),
        }];
    }
    Ok((WritePlan { ranges }, map.emptied()))
}

/// Whether a layer with the pages of the plan can go onto the map.
fn fits(map: &PageMap, plan: &WritePlan) -> bool {
    // A range adds itself, and splits at most one extent.
    let most = map.extents().len() + 2 * plan.ranges.len();
    most <= MAX_EXTENTS || map.overlay(&changes(&plan.ranges)).is_ok()
}

/// Runs of pages as changes to a page map.
pub(crate) fn changes(ranges: &[PageRange]) -> Vec<Change> {
    ranges
        .iter()
        .map(|range| Change {
            // Pages of at most 64 GiB.
            first: range.first as u32,
            count: range.count as u32,
        })
        .collect()
}

/// Joins sorted ranges that overlap or lie at most `gap` pages apart.
pub(crate) fn join(ranges: &[PageRange], gap: u64) -> Vec<PageRange> {
    let mut out: Vec<PageRange> = Vec::with_capacity(ranges.len());
    for &range in ranges {
        match out.last_mut() {
            Some(last) if last.end() + gap >= range.first => {
                last.count = last.end().max(range.end()) - last.first;
            }
            _ => out.push(range),
        }
    }
    out
}

/// The pages that are data and not holes in the image.
fn image_data(image: &ImageLayers) -> Vec<PageRange> {
    let mut ranges = Vec::new();
    for extent in image.map().extents() {
        let Some(file) = image.layers().get(extent.layer as usize) else {
            continue;
        };
        let start = u64::from(extent.layer_first) * PAGE_SIZE;
        let end = start + u64::from(extent.count) * PAGE_SIZE;
        for data in data_in(file, start, end) {
            let first_in_layer = data.start / PAGE_SIZE;
            ranges.push(PageRange {
                first: u64::from(extent.first) + first_in_layer - u64::from(extent.layer_first),
                count: data.end.div_ceil(PAGE_SIZE) - first_in_layer,
            });
        }
    }
    ranges
}

/// The parts of a file that hold data. A file that cannot be asked is all data.
fn data_in(file: &impl AsFd, start: u64, end: u64) -> Vec<Range<u64>> {
    DataRanges::new(file, start..end)
        .collect::<io::Result<_>>()
        .unwrap_or_else(|_| std::iter::once(start..end).collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use forkd_vmm_proto::PageMap;

    use super::*;

    fn range(first: u64, count: u64) -> PageRange {
        PageRange { first, count }
    }

    /// A guest that dirties scattered pages can be cut on and on: before a map is too large, a layer holds
    /// all of memory.
    #[test]
    fn a_chain_of_cuts_never_outgrows_the_page_map() {
        const PAGES: u32 = 1 << 20;
        let mut map = PageMap::identity(PAGES);
        let mut newest = vec![0; PAGES as usize];
        let mut flattened = 0;
        for cut in 0..40 {
            let changed: Vec<_> = (0..1024).map(|n| range(n * 1024 + cut * 7, 1)).collect();
            let all = || Ok::<_, ()>(vec![range(0, u64::from(PAGES))]);
            let (plan, onto) = plan_onto(map, changed.clone(), all).unwrap();
            let layer = onto.layers();
            flattened += usize::from(onto.extents().is_empty());
            map = onto.overlay(&changes(&plan.ranges)).unwrap();
            for written in &plan.ranges {
                newest[written.first as usize..written.end() as usize].fill(layer);
            }
            assert!(changed.iter().all(|r| newest[r.first as usize] == layer));
            for extent in map.extents() {
                let (first, end) = (
                    extent.first as usize,
                    (extent.first + extent.count) as usize,
                );
                assert!(
                    newest[first..end]
                        .iter()
                        .all(|layer| *layer == extent.layer)
                );
            }
        }
        assert_eq!(map.layers(), 41, "the number of layers is what it would be");
        assert!((1..=3).contains(&flattened), "{flattened}");
    }

    #[test]
    fn few_ranges_are_left_alone() {
        let private = vec![range(1, 1), range(3, 1)];
        assert_eq!(plan_changed(private.clone()).ranges, private);
    }

    #[test]
    fn many_ranges_are_joined_over_small_gaps() {
        let private: Vec<_> = (0..4000).map(|n| range(n * 2, 1)).collect();
        let plan = plan_changed(private);
        assert_eq!(plan.ranges.len(), MANY_RANGES);
        assert!(plan.pages() < 8000);
        let private: Vec<_> = (0..200).map(|n| range(n * 2, 1)).collect();
        assert_eq!(plan_changed(private).ranges.len(), FEW_RANGES);
    }

    #[test]
    fn far_away_pages_stay_apart() {
        let mut private: Vec<_> = (0..200).map(|n| range(n * 2, 1)).collect();
        private.extend((1..200).map(|n| range(n * 10_000, 1)));
        let plan = plan_changed(private);
        assert_eq!(plan.ranges.first(), Some(&range(0, 199 * 2 + 1)));
        assert_eq!(plan.ranges.len(), 200);
    }

    #[test]
    fn there_are_never_too_many() {
        let private: Vec<_> = (0..5000).map(|n| range(n * 1000, 1)).collect();
        assert_eq!(plan_changed(private).ranges.len(), MANY_RANGES);
    }

    #[test]
    fn a_full_plan_leaves_holes_of_the_image_out() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(&[1; 4096], 16 * PAGE_SIZE).unwrap();
        let image = ImageLayers::new(PageMap::identity(256), vec![file.into()]).unwrap();
        let plan = plan_full(vec![range(3, 2)], Some(&image));
        assert_eq!(plan.ranges.first(), Some(&range(3, 2)));
        assert!(
            plan.ranges[1..]
                .iter()
                .any(|r| (r.first..r.end()).contains(&16))
        );
        assert!(plan.pages() < 256);
    }
}
