//! The chains that tags form by naming a parent.

use forkd_types::Tag;

use crate::error::StoreError;
use crate::manifest::{MAX_CHAIN, Manifest};
use crate::store::Store;
use crate::tags::Entry;

impl Store {
    /// Tags that build directly on this one.
    pub fn dependents(&self, tag: &Tag) -> Vec<Tag> {
        self.tags()
            .values()
            .filter_map(|entry| match entry {
                Entry::Whole(manifest) => Some(manifest),
                Entry::Broken { .. } => None,
            })
            .filter(|manifest| manifest.parent.as_ref().is_some_and(|p| p.tag == *tag))
            .map(|manifest| manifest.tag.clone())
            .collect()
    }

    /// The tag and its descendants; a tag comes after every tag that builds on it.
    pub(crate) fn subtree(&self, tag: &Tag) -> Vec<Tag> {
        let mut order = vec![tag.clone()];
        let mut at = 0;
        while let Some(next) = order.get(at).cloned() {
            for dependent in self.dependents(&next) {
                if !order.contains(&dependent) {
                    order.push(dependent);
                }
            }
            at += 1;
        }
        order.reverse();
        order
    }

    /// Ancestors of a tag, the oldest first. A parent that was deleted ends the list.
    pub fn ancestors(&self, manifest: &Manifest) -> Vec<Tag> {
        let tags = self.tags();
        let mut chain = Vec::new();
        let mut parent = manifest.parent.clone();
        while let Some(next) = parent {
            let Some(Entry::Whole(found)) = tags.get(&next.tag) else {
                break;
            };
            if found.digest() != next.digest || chain.len() >= MAX_CHAIN {
                break;
            }
            chain.push(next.tag);
            parent = found.parent.clone();
        }
        chain.reverse();
        chain
    }

    pub(crate) fn check_chain(&self, manifest: &Manifest) -> Result<(), StoreError> {
        let depth = self.ancestors(manifest).len();
        if depth >= MAX_CHAIN {
            return Err(StoreError::ChainTooLong {
                tag: manifest.tag.clone(),
                depth: depth + 1,
                limit: MAX_CHAIN,
            });
        }
        Ok(())
    }
}
