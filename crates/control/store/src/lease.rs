//! Counting the users of blobs.

use std::collections::HashMap;
use std::sync::Arc;

use forkd_types::Digest;
use parking_lot::{Mutex, MutexGuard};

/// How often each blob is held.
#[derive(Debug, Clone, Default)]
pub struct Leases(Arc<Mutex<Held>>);

#[derive(Debug, Default)]
struct Held {
    counts: HashMap<Digest, usize>,
    /// A blob lost its last lease, or a tag was deleted, since the last collection.
    freed: bool,
}

impl Leases {
    /// Holds these blobs until the lease is dropped.
    pub fn hold(&self, digests: impl IntoIterator<Item = Digest>) -> Lease {
        let digests: Vec<Digest> = digests.into_iter().collect();
        let mut held = self.lock();
        for digest in &digests {
            *held.counts.entry(*digest).or_default() += 1;
        }
        drop(held);
        Lease {
            leases: self.clone(),
            digests,
        }
    }

    /// The blob is held.
    pub fn is_held(&self, digest: &Digest) -> bool {
        self.lock().counts.contains_key(digest)
    }

    /// Notes that a blob may have come free for another reason than the end of a lease.
    pub fn note_freed(&self) {
        self.lock().freed = true;
    }

    /// Whether any blob has come free since this was last asked.
    pub fn take_freed(&self) -> bool {
        std::mem::take(&mut self.lock().freed)
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.0.lock()
    }
}

/// Keeps blobs from being removed for as long as it lives.
#[derive(Debug)]
pub struct Lease {
    leases: Leases,
    digests: Vec<Digest>,
}

impl Lease {
    pub fn digests(&self) -> &[Digest] {
        &self.digests
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut held = self.leases.lock();
        for digest in &self.digests {
            if let Some(count) = held.counts.get_mut(digest) {
                *count -= 1;
                if *count == 0 {
                    held.counts.remove(digest);
                    held.freed = true;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_until_the_last_lease_goes() {
        let leases = Leases::default();
        let digest = Digest([1; 32]);
        let one = leases.hold([digest]);
        let two = leases.hold([digest, digest]);
        drop(one);
        assert!(leases.is_held(&digest));
        assert!(!leases.take_freed());
        drop(two);
        assert!(!leases.is_held(&digest));
        assert!(leases.take_freed());
        assert!(!leases.take_freed());
    }
}
