//! Ends of VMMs, as reported by `forkd-spawn`.
//!
//! [`Ends::watch`] collects the reports, so that a test can wait for an end that was reported before it
//! asked.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use forkd_types::SandboxId;
use forkd_vmm_link::Endings;
use forkd_vmm_proto::spawn::HowEnded;
use tokio::sync::Notify;

/// The ends seen so far.
#[derive(Debug, Default)]
pub struct Ends {
    seen: Mutex<BTreeMap<SandboxId, HowEnded>>,
    changed: Notify,
}

impl Ends {
    /// Collects the reports of a stream until it closes.
    pub fn watch(mut endings: Endings) -> Arc<Self> {
        let ends = Arc::new(Self::default());
        let record = Arc::clone(&ends);
        tokio::spawn(async move {
            while let Some(ended) = endings.next().await {
                record.lock().insert(ended.id, ended.how);
                record.changed.notify_waiters();
            }
        });
        ends
    }

    /// Waits until a VM has ended.
    pub async fn of(&self, id: &SandboxId) -> HowEnded {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if let Some(how) = self.lock().get(id) {
                return *how;
            }
            changed.await;
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<SandboxId, HowEnded>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
