//! Which sandboxes there are.

use std::collections::BTreeMap;
use std::sync::Arc;

use forkd_types::SandboxId;
use parking_lot::RwLock;

use super::handle::SandboxHandle;
use crate::error::Error;

/// Every sandbox, by id; ids begin with the time, so the order is that of creation.
#[derive(Debug, Default)]
pub struct Registry(RwLock<BTreeMap<SandboxId, Arc<SandboxHandle>>>);

impl Registry {
    /// Enters a sandbox. Its owner runs already.
    pub(super) fn insert(&self, sandbox: &Arc<SandboxHandle>) {
        self.0
            .write()
            .insert(sandbox.id.clone(), Arc::clone(sandbox));
    }

    /// Forgets a sandbox.
    pub fn remove(&self, id: &SandboxId) {
        self.0.write().remove(id);
    }

    /// Finds a sandbox by its ID.
    pub fn get(&self, id: &SandboxId) -> Result<Arc<SandboxHandle>, Error> {
        self.0
            .read()
            .get(id)
            .cloned()
            .ok_or_else(|| Error::NoSandbox { id: id.clone() })
    }

    /// Every sandbox, the oldest first.
    pub fn list(&self) -> Vec<Arc<SandboxHandle>> {
        self.0.read().values().cloned().collect()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.read().len()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
