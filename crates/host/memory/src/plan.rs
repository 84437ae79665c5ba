//! Which pages a cut looks at.

use std::os::fd::AsFd;

use forkd_sys::PageRange;
use rustix::fs::SeekFrom;

use crate::{ImageLayers, PAGE_SIZE};

/// Extents are joined until there are no more than this many, so that a child of the cut is not made of
/// countless small mappings.
const COMFORTABLE_RANGES: usize = 1024;
const MAX_GAP: u64 = 512;

/// The pages to look at, in order. Those that turn out to be zero are left out of the file.
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

/// All pages that are not known to be zero: those of the image and those the VM has made its own.
pub fn plan_full(private: Vec<PageRange>, image: Option<&ImageLayers>) -> WritePlan {
    let mut ranges = private;
    if let Some(image) = image {
        ranges.extend(image_data(image));
        ranges.sort_by_key(|r| r.first);
    }
    WritePlan {
        ranges: join(ranges, 0),
    }
}

/// The pages the VM has made its own, and small gaps between them.
pub fn plan_changed(private: Vec<PageRange>) -> WritePlan {
    let mut gap = 1;
    let mut ranges = join(private, 0);
    while ranges.len() > COMFORTABLE_RANGES && gap <= MAX_GAP {
        ranges = join(ranges, gap);
        gap *= 2;
    }
    WritePlan { ranges }
}

/// Joins sorted ranges that overlap or lie at most `gap` pages apart.
fn join(ranges: Vec<PageRange>, gap: u64) -> Vec<PageRange> {
    let mut out: Vec<PageRange> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match out.last_mut() {
            Some(last) if last.end() + gap >= range.first => {
                last.count = last.end().max(range.end()) - last.first;
            }
            _ => out.push(range),
        }
    }
    out
}

/// The pages for which the image has data rather than a hole.
fn image_data(image: &ImageLayers) -> Vec<PageRange> {
    let mut ranges = Vec::new();
    for extent in image.map().extents() {
        let Some(file) = image.layers().get(extent.layer as usize) else {
            continue;
        };
        let start = u64::from(extent.layer_first) * PAGE_SIZE;
        let end = start + u64::from(extent.count) * PAGE_SIZE;
        for (from, to) in data_in(file, start, end) {
            let first_in_layer = from / PAGE_SIZE;
            ranges.push(PageRange {
                first: u64::from(extent.first) + first_in_layer - u64::from(extent.layer_first),
                count: to.div_ceil(PAGE_SIZE) - first_in_layer,
            });
        }
    }
    ranges
}

fn data_in(file: impl AsFd, start: u64, end: u64) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    let mut at = start;
    while at < end {
        let Ok(data) = rustix::fs::seek(&file, SeekFrom::Data(at)) else {
            // ENXIO: no data after this point. Anything else: a file that cannot tell, so all is data.
            if rustix::fs::seek(&file, SeekFrom::End(0)).is_err() {
                found.push((at, end));
            }
            break;
        };
        if data >= end {
            break;
        }
        let hole = rustix::fs::seek(&file, SeekFrom::Hole(data)).unwrap_or(end);
        found.push((data, hole.min(end)));
        at = hole;
    }
    found
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use forkd_vmm_proto::PageMap;

    use super::*;

    fn range(first: u64, count: u64) -> PageRange {
        PageRange { first, count }
    }

    #[test]
    fn few_ranges_are_left_alone() {
        let private = vec![range(1, 1), range(3, 1)];
        assert_eq!(plan_changed(private.clone()).ranges, private);
    }

    #[test]
    fn many_ranges_are_joined_over_small_gaps() {
        let private: Vec<_> = (0..4000).map(|n| range(n * 3, 1)).collect();
        let plan = plan_changed(private);
        assert_eq!(plan.ranges, [range(0, 3999 * 3 + 1)]);
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
