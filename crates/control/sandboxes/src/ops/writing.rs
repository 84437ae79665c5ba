//! Tags that are being written, and tags whose writing failed.
//!
//! [`WritingTags::claim`] gives a tag to one request at a time. Dropping the [`Claimed`] frees the tag.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forkd_types::Tag;

use crate::clock;

/// A tag that is not in the store yet: being written, or failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Writing {
    /// When its writing began.
    pub since_unix: u64,
    /// The sandbox it is cut from.
    pub branched_from: Option<String>,
    /// How long that one stood still, once it is known.
    pub pause_us: Option<u64>,
    /// Why it failed.
    pub failure: Option<String>,
}

/// Tags that are being written.
#[derive(Debug, Clone, Default)]
pub struct WritingTags(Arc<Mutex<BTreeMap<Tag, Writing>>>);

impl WritingTags {
    /// Claims a tag; `None` if another request writes it already. A failure of an earlier attempt is forgotten.
    pub fn claim(&self, tag: &Tag, branched_from: Option<String>) -> Option<Claimed> {
        let mut map = self.lock();
        if map.get(tag).is_some_and(|found| found.failure.is_none()) {
            return None;
        }
        map.insert(
            tag.clone(),
            Writing {
                since_unix: clock::unix(),
                branched_from,
                pause_us: None,
                failure: None,
            },
        );
        Some(Claimed {
            tags: self.clone(),
            tag: tag.clone(),
            done: false,
        })
    }

    /// The tag is being written.
    pub fn is_writing(&self, tag: &Tag) -> bool {
        self.lock()
            .get(tag)
            .is_some_and(|found| found.failure.is_none())
    }

    /// The state of one tag, if it is being written or failed.
    pub fn get(&self, tag: &Tag) -> Option<Writing> {
        self.lock().get(tag).cloned()
    }

    /// Everything that is not in the store.
    pub fn list(&self) -> Vec<(Tag, Writing)> {
        self.lock()
            .iter()
            .map(|(tag, writing)| (tag.clone(), writing.clone()))
            .collect()
    }

    /// Forgets a failure. Says whether there was one.
    pub fn forget_failed(&self, tag: &Tag) -> bool {
        let mut map = self.lock();
        let failed = map.get(tag).is_some_and(|found| found.failure.is_some());
        if failed {
            map.remove(tag);
        }
        failed
    }

    /// How many are being written.
    pub fn count(&self) -> usize {
        self.lock()
            .values()
            .filter(|found| found.failure.is_none())
            .count()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Tag, Writing>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A tag that is ours to write; it is free again when this is dropped.
#[derive(Debug)]
pub struct Claimed {
    tags: WritingTags,
    tag: Tag,
    done: bool,
}

impl Claimed {
    pub fn tag(&self) -> &Tag {
        &self.tag
    }

    /// The source runs again.
    pub fn captured(&self, pause_us: u64) {
        if let Some(found) = self.tags.lock().get_mut(&self.tag) {
            found.pause_us = Some(pause_us);
        }
    }

    /// Leaves a note why there is no such tag, for a caller who did not wait.
    pub fn failed(mut self, reason: String) {
        self.done = true;
        if let Some(found) = self.tags.lock().get_mut(&self.tag) {
            found.failure = Some(reason);
        }
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        if !self.done {
            self.tags.lock().remove(&self.tag);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_writer_a_tag_and_failures_are_kept() {
        let tags = WritingTags::default();
        let tag: Tag = "t".parse().unwrap();
        let claimed = tags.claim(&tag, None).unwrap();
        assert!(tags.claim(&tag, None).is_none());
        claimed.failed("disk full".into());
        assert_eq!(tags.list()[0].1.failure.as_deref(), Some("disk full"));
        assert!(!tags.is_writing(&tag));
        drop(tags.claim(&tag, None).unwrap());
        assert!(tags.list().is_empty());
    }
}
