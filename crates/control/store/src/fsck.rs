//! Looking for damage.

use std::collections::BTreeMap;
use std::fs::File;

use forkd_types::Digest;

use crate::blobs;
use crate::error::StoreError;
use crate::sparse::page_digest;
use crate::store::{Entry, Store, chain, read_manifest};

/// What a check found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FsckFindings {
    /// Tags looked at.
    pub snapshots: u64,
    /// Blobs whose digest was computed again.
    pub blobs_checked: u64,
    /// What is wrong.
    pub problems: Vec<String>,
    /// What was put right.
    pub repaired: Vec<String>,
}

impl Store {
    /// Checks every manifest, and with `deep` every byte. A tag that turns out to be damaged is marked, so
    /// that nothing starts from it; blobs that nobody needs are removed.
    pub fn fsck(&self, deep: bool) -> Result<FsckFindings, StoreError> {
        let mut findings = FsckFindings::default();
        let mut damaged = BTreeMap::new();
        if deep {
            self.scrub(&mut findings, &mut damaged)?;
        }
        for entry in self.list() {
            findings.snapshots += 1;
            let tag = entry.tag().clone();
            match read_manifest(self.layout(), &tag) {
                Err(error) => {
                    findings.problems.push(chain(&error));
                    self.mark_broken(&tag, chain(&error));
                }
                Ok(manifest) => {
                    let problem = manifest.blobs().iter().find_map(|blob| {
                        match blobs::stat(self.layout(), &blob.digest) {
                            Ok(Some(sizes)) if sizes.logical == blob.bytes => {
                                damaged.get(&blob.digest).cloned()
                            }
                            Ok(Some(_)) => Some(format!("{} has another size", blob.digest)),
                            Ok(None) => Some(format!("{} is missing", blob.digest)),
                            Err(error) => Some(chain(&error)),
                        }
                    });
                    if let Some(problem) = problem {
                        findings.problems.push(format!("snapshot {tag}: {problem}"));
                        if matches!(entry, Entry::Whole(_)) {
                            self.mark_broken(&tag, problem);
                        }
                    }
                }
            }
        }
        let freed = self.collect()?;
        if freed > 0 {
            findings
                .repaired
                .push(format!("removed {freed} bytes that no snapshot needs"));
        }
        Ok(findings)
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
                Err(error) => {
                    damaged.insert(digest, format!("{digest} cannot be read: {error}"));
                }
            }
        }
        Ok(())
    }
}
