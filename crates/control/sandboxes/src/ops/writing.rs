//! Tags that are being written, and tags whose writing failed.
//!
//! [`WritingTags::claim`] gives a tag to one request at a time. Dropping the [`Claimed`] frees the tag. A parent that
//! boots can be cancelled ([`WritingTags::cancel`]) until its cut begins.
//!
//! A tag that leaves the list is told to the hook of [`WritingTags::new`] before another request can claim it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use forkd_types::Tag;
use parking_lot::{Mutex, MutexGuard};
use tokio_util::sync::CancellationToken;

use crate::clock;

/// Failures that are kept. The oldest goes when there is one more: any client can make up names.
const MAX_FAILURES: usize = 256;

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

/// An entry of [`WritingTags`].
#[derive(Debug)]
struct Entry {
    writing: Writing,
    /// Cancels the work. Set only while a parent boots.
    cancel: Option<CancellationToken>,
    /// Cancelled when the [`Claimed`] is gone.
    ended: CancellationToken,
}

impl Entry {
    fn is_writing(&self) -> bool {
        self.writing.failure.is_none()
    }
}

type Left = Arc<dyn Fn(&Tag) + Send + Sync>;

/// Tags that are being written.
#[derive(Clone)]
pub struct WritingTags {
    map: Arc<Mutex<BTreeMap<Tag, Entry>>>,
    left: Left,
}

impl fmt::Debug for WritingTags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WritingTags").field(&self.map).finish()
    }
}

impl WritingTags {
    /// `left` is called with each tag that leaves the list, stored or not. It must not use the list.
    pub fn new(left: impl Fn(&Tag) + Send + Sync + 'static) -> Self {
        Self {
            map: Arc::default(),
            left: Arc::new(left),
        }
    }

    /// Claims a tag; `None` if another request writes it already. A failure of an earlier attempt is forgotten.
    pub fn claim(&self, tag: &Tag, branched_from: Option<String>) -> Option<Claimed> {
        let mut map = self.lock();
        if map.get(tag).is_some_and(Entry::is_writing) {
            return None;
        }
        let ended = CancellationToken::new();
        let writing = Writing {
            since_unix: clock::unix(),
            branched_from,
            pause_us: None,
            failure: None,
        };
        map.insert(
            tag.clone(),
            Entry {
                writing,
                cancel: None,
                ended: ended.clone(),
            },
        );
        Some(Claimed {
            tags: self.clone(),
            tag: tag.clone(),
            done: false,
            ended,
        })
    }

    /// Cancels the boot of a parent. The returned token is cancelled when the tag is free again. `None` if no parent
    /// of that tag boots, or its cut has begun.
    pub fn cancel(&self, tag: &Tag) -> Option<CancellationToken> {
        let map = self.lock();
        let found = map.get(tag).filter(|found| found.is_writing())?;
        found.cancel.as_ref()?.cancel();
        Some(found.ended.clone())
    }

    /// The tag is being written.
    pub fn is_writing(&self, tag: &Tag) -> bool {
        self.lock().get(tag).is_some_and(Entry::is_writing)
    }

    /// The state of one tag, if it is being written or failed.
    pub fn get(&self, tag: &Tag) -> Option<Writing> {
        self.lock().get(tag).map(|found| found.writing.clone())
    }

    /// Everything that is not in the store.
    pub fn list(&self) -> Vec<(Tag, Writing)> {
        self.lock()
            .iter()
            .map(|(tag, found)| (tag.clone(), found.writing.clone()))
            .collect()
    }

    /// Forgets a failure. Says whether there was one.
    pub fn forget_failed(&self, tag: &Tag) -> bool {
        let mut map = self.lock();
        let failed = map.get(tag).is_some_and(|found| !found.is_writing());
        if failed {
            self.remove(&mut map, tag);
        }
        failed
    }

    /// How many are being written.
    pub fn count(&self) -> usize {
        self.lock()
            .values()
            .filter(|found| found.is_writing())
            .count()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Tag, Entry>> {
        self.map.lock()
    }

    fn remove(&self, map: &mut BTreeMap<Tag, Entry>, tag: &Tag) {
        map.remove(tag);
        (self.left)(tag);
    }
}

/// A tag that is ours to write; it is free again when this is dropped.
#[derive(Debug)]
pub struct Claimed {
    tags: WritingTags,
    tag: Tag,
    done: bool,
    ended: CancellationToken,
}

impl Claimed {
    pub fn tag(&self) -> &Tag {
        &self.tag
    }

    /// Lets [`WritingTags::cancel`] cancel the work from now on.
    pub fn allow_cancel(&self) -> CancellationToken {
        let cancel = CancellationToken::new();
        if let Some(found) = self.tags.lock().get_mut(&self.tag) {
            found.cancel = Some(cancel.clone());
        }
        cancel
    }

    /// The work cannot be cancelled from now on. Returns whether it was cancelled before.
    pub fn forbid_cancel(&self) -> bool {
        let mut map = self.tags.lock();
        let cancel = map.get_mut(&self.tag).and_then(|found| found.cancel.take());
        cancel.is_some_and(|cancel| cancel.is_cancelled())
    }

    /// The source runs again.
    pub fn captured(&self, pause_us: u64) {
        if let Some(found) = self.tags.lock().get_mut(&self.tag) {
            found.writing.pause_us = Some(pause_us);
        }
    }

    /// Leaves a note why there is no such tag, for a caller who did not wait.
    pub fn failed(mut self, reason: String) {
        self.done = true;
        let mut map = self.tags.lock();
        if let Some(found) = map.get_mut(&self.tag) {
            found.writing.failure = Some(reason);
        }
        let failed = map
            .iter()
            .filter(|(_, found)| found.writing.failure.is_some());
        if failed.clone().count() > MAX_FAILURES {
            let oldest = failed.min_by_key(|(_, found)| found.writing.since_unix);
            if let Some(oldest) = oldest.map(|(tag, _)| tag.clone()) {
                self.tags.remove(&mut map, &oldest);
            }
        }
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        if !self.done {
            self.tags.remove(&mut self.tags.lock(), &self.tag);
        }
        self.ended.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_writer_a_tag_and_failures_are_kept() {
        let tags = WritingTags::new(|_| {});
        let tag: Tag = "t".parse().unwrap();
        let claimed = tags.claim(&tag, None).unwrap();
        assert!(tags.claim(&tag, None).is_none());
        claimed.failed("disk full".into());
        assert_eq!(tags.list()[0].1.failure.as_deref(), Some("disk full"));
        assert!(!tags.is_writing(&tag));
        drop(tags.claim(&tag, None).unwrap());
        assert!(tags.list().is_empty());
    }

    #[test]
    fn a_parent_is_cancelled_until_its_cut_begins() {
        let tags = WritingTags::new(|_| {});
        let tag: Tag = "t".parse().unwrap();
        let claimed = tags.claim(&tag, None).unwrap();
        assert!(tags.cancel(&tag).is_none(), "no parent boots yet");
        let cancelled = claimed.allow_cancel();
        let ended = tags.cancel(&tag).unwrap();
        assert!(cancelled.is_cancelled() && !ended.is_cancelled());
        assert!(claimed.forbid_cancel());
        assert!(tags.cancel(&tag).is_none(), "the cut has begun");
        claimed.failed("cancelled".into());
        assert!(ended.is_cancelled());
    }

    #[test]
    fn failures_of_made_up_names_are_bounded_and_writers_stay() {
        let tags = WritingTags::new(|_| {});
        let writer = tags.claim(&"writer".parse().unwrap(), None).unwrap();
        for number in 0..MAX_FAILURES + 10 {
            let tag: Tag = format!("t{number}").parse().unwrap();
            tags.claim(&tag, None).unwrap().failed("no".into());
        }
        assert_eq!(tags.list().len(), MAX_FAILURES + 1);
        assert!(tags.is_writing(writer.tag()));
    }
}
