//! The content of a fake guest.
//!
//! All of it lies in guest memory, so cuts, restores and roll-backs apply to it. The archives in `fixtures/` hold its
//! encoding: the fields do not change.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Everything a fake guest knows; all of it lies in guest memory. The archives in `fixtures/` hold this encoding, so the
/// fields do not change.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Guest {
    /// Content by absolute path.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Host name of the last identity.
    pub hostname: String,
    /// Machine id of the last identity.
    pub machine_id: String,
    /// Generation of the last identity.
    pub generation: String,
    /// Wall clock of the guest minus that of the host, in nanoseconds.
    pub clock_offset_ns: i64,
    /// The number of the next process.
    pub next_process: u64,
}

impl Guest {
    /// The names directly below a directory, each with whether it is a directory itself.
    pub fn entries(&self, directory: &str) -> BTreeMap<String, bool> {
        let prefix = format!("{}/", directory.trim_end_matches('/'));
        let mut found = BTreeMap::new();
        for path in self.files.keys() {
            if let Some(rest) = path.strip_prefix(&prefix) {
                match rest.split_once('/') {
                    Some((name, _)) => found.insert(name.to_owned(), true),
                    None => found.insert(rest.to_owned(), false),
                };
            }
        }
        found
    }
}
