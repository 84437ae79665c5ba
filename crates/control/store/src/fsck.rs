//! Checking the store for damage.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;

use forkd_types::{Digest, Tag, chain};

use crate::blobs;
use crate::digest::page_digest;
use crate::error::StoreError;
use crate::store::Store;
use crate::tags::read_manifest;

/// Result of a check.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FsckFindings {
    /// Number of tags that were checked.
    pub snapshots: u64,
    /// Number of blobs whose digest was computed again.
    pub blobs_checked: u64,
    /// One line per problem.
    pub problems: Vec<String>,
    /// One line per repair.
    pub repaired: Vec<String>,
}

impl Store {
    /// Checks every manifest, and with `deep` the content of every blob. Marks damaged tags, so that nothing starts from
    /// them, reads the sizes of all blobs again, and removes unused blobs.
    pub fn fsck(&self, deep: bool) -> Result<FsckFindings, StoreError> {
        let mut findings = FsckFindings::default();
        let mut damaged = BTreeMap::new();
        {
            let _commit = self.commit();
            self.blobs
                .lock()
                .reload(&self.layout, self.syncer.epoch())?;
        }
        if deep {
            self.scrub(&mut findings, &mut damaged)?;
        }
        for entry in self.list() {
            findings.snapshots += 1;
            findings.problems.extend(self.check(entry.tag(), &damaged));
        }
        let freed = self.collect()?;
        if freed > 0 {
            findings
                .repaired
                .push(format!("removed {freed} bytes that no snapshot needs"));
        }
        Ok(findings)
    }

    /// Checks one tag and marks it if it is damaged. Holds the commit lock: a tag that was deleted since the list was
    /// made must not be entered again.
    pub(crate) fn check(&self, tag: &Tag, damaged: &BTreeMap<Digest, String>) -> Option<String> {
        let _commit = self.commit();
        if !self.contains(tag) {
            return None;
        }
        let manifest = match read_manifest(self.layout(), tag) {
            Ok(manifest) => manifest,
            Err(error) => {
                self.mark_broken(tag, chain(&error));
                return Some(chain(&error));
            }
        };
        let problem = manifest.blobs().iter().find_map(|blob| {
            match blobs::stat(self.layout(), &blob.digest) {
                Ok(Some(sizes)) if sizes.logical == blob.bytes => {
                    damaged.get(&blob.digest).cloned()
                }
                Ok(Some(_)) => Some(format!("{} has another size", blob.digest)),
                Ok(None) => Some(format!("{} is missing", blob.digest)),
                Err(error) => Some(chain(&error)),
            }
        })?;
        self.mark_broken(tag, problem.clone());
        Some(format!("snapshot {tag}: {problem}"))
    }

    fn scrub(
        &self,
        findings: &mut FsckFindings,
        damaged: &mut BTreeMap<Digest, String>,
    ) -> Result<(), StoreError> {
        for digest in blobs::list(self.layout())? {
            let found = File::open(self.layout().blob(&digest)).and_then(|file| page_digest(&file));
            findings.blobs_checked += 1;
            match found {
                Ok(found) if found == digest => {}
                Ok(_) => {
                    damaged.insert(digest, format!("{digest} does not hold what its name says"));
                }
                // It was removed since the list was made; a tag that needs it says so.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    damaged.insert(digest, format!("{digest} cannot be read: {error}"));
                }
            }
        }
        Ok(())
    }
}
