//! Sets of pages as sorted, disjoint runs.
//!
//! [`PageSet`] is made from ranges in any order and keeps them normalised: sorted, not empty, not touching.

use forkd_sys::PageRange;

/// Pages, as runs that are in order, do not touch and are not empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageSet(Vec<PageRange>);

impl PageSet {
    /// The pages of some ranges, in any order.
    pub fn new(mut ranges: Vec<PageRange>) -> Self {
        ranges.retain(|range| range.count > 0);
        if !ranges.is_sorted_by_key(|range| range.first) {
            ranges.sort_unstable_by_key(|range| range.first);
        }
        let mut out: Vec<PageRange> = Vec::with_capacity(ranges.len());
        for range in ranges {
            match out.last_mut() {
                Some(last) if last.end() >= range.first => {
                    last.count = last.end().max(range.end()) - last.first;
                }
                _ => out.push(range),
            }
        }
        Self(out)
    }

    pub fn ranges(&self) -> &[PageRange] {
        &self.0
    }

    /// How many pages.
    pub fn pages(&self) -> u64 {
        self.0.iter().map(|range| range.count).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the pages of another set.
    pub fn add(&mut self, other: &Self) {
        if other.is_empty() {
            return;
        }
        let mut ranges = std::mem::take(&mut self.0);
        ranges.extend_from_slice(&other.0);
        *self = Self::new(ranges);
    }

    /// Splits into the pages that are in the other set and those that are not.
    pub fn split(&self, other: &Self) -> (Self, Self) {
        let (mut inside, mut outside) = (Vec::new(), Vec::new());
        let mut others = other.0.iter().copied().peekable();
        for range in &self.0 {
            let mut at = range.first;
            while at < range.end() {
                while others.next_if(|next| next.end() <= at).is_some() {}
                let (stop, is_inside) = match others.peek() {
                    Some(next) if next.first <= at => (next.end().min(range.end()), true),
                    Some(next) => (next.first.min(range.end()), false),
                    None => (range.end(), false),
                };
                let piece = PageRange {
                    first: at,
                    count: stop - at,
                };
                if is_inside {
                    inside.push(piece);
                } else {
                    outside.push(piece);
                }
                at = stop;
            }
        }
        (Self::new(inside), Self::new(outside))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn model(set: &PageSet) -> BTreeSet<u64> {
        set.0.iter().flat_map(|r| r.first..r.end()).collect()
    }

    fn sets() -> impl Strategy<Value = PageSet> {
        proptest::collection::vec((0u64..80, 0u64..9), 0..12).prop_map(|ranges| {
            let range = |(first, count)| PageRange { first, count };
            PageSet::new(ranges.into_iter().map(range).collect())
        })
    }

    proptest! {
        #[test]
        fn sets_are_sets(a in sets(), b in sets()) {
            for set in [&a, &b] {
                prop_assert!(set.0.windows(2).all(|w| w[0].end() < w[1].first));
            }
            let (left, right) = (model(&a), model(&b));
            let (inside, outside) = a.split(&b);
            prop_assert_eq!(model(&inside), &left & &right);
            prop_assert_eq!(model(&outside), &left - &right);
            let mut both = a.clone();
            both.add(&b);
            prop_assert_eq!(model(&both), &left | &right);
            prop_assert_eq!(both.pages(), (&left | &right).len() as u64);
        }
    }
}
