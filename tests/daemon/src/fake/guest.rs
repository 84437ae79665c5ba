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

/// Exists while user processes are frozen. A file, because a cut captures it and the encoding has no field for it.
const FROZEN: &str = "/run/frozen";
/// State of user processes when the last identity came: `frozen` or `running`. Tests read it.
const AT_IDENTITY: &str = "/run/processes-at-identity";

impl Guest {
    pub fn is_frozen(&self) -> bool {
        self.files.contains_key(FROZEN)
    }

    /// Freezes user processes. Returns whether they were frozen before.
    pub fn freeze(&mut self) -> bool {
        self.files.insert(FROZEN.to_owned(), Vec::new()).is_some()
    }

    /// Thaws user processes. Returns whether they were frozen before.
    pub fn thaw(&mut self) -> bool {
        self.files.remove(FROZEN).is_some()
    }

    /// Thaws user processes as the last step of an identity.
    pub fn thaw_at_identity(&mut self) -> bool {
        let frozen = self.thaw();
        let state = if frozen { "frozen" } else { "running" };
        self.files.insert(AT_IDENTITY.to_owned(), state.into());
        frozen
    }

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
