//! Blobs in use.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use forkd_types::Digest;

/// How often each blob is held.
#[derive(Debug, Clone, Default)]
pub struct Leases(Arc<Mutex<HashMap<Digest, usize>>>);

impl Leases {
    /// Holds these blobs until the lease is dropped.
    pub fn hold(&self, digests: impl IntoIterator<Item = Digest>) -> Lease {
        let digests: Vec<Digest> = digests.into_iter().collect();
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for digest in &digests {
            *held.entry(*digest).or_default() += 1;
        }
        Lease {
            leases: self.clone(),
            digests,
        }
    }

    /// The blob is held.
    pub fn is_held(&self, digest: &Digest) -> bool {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .contains_key(digest)
    }
}

/// Keeps blobs from being removed for as long as it lives.
#[derive(Debug)]
pub struct Lease {
    leases: Leases,
    digests: Vec<Digest>,
}

impl Lease {
    /// What is held.
    pub fn digests(&self) -> &[Digest] {
        &self.digests
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut held = self.leases.0.lock().unwrap_or_else(PoisonError::into_inner);
        for digest in &self.digests {
            if let Some(count) = held.get_mut(digest) {
                *count -= 1;
                if *count == 0 {
                    held.remove(digest);
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
        drop(two);
        assert!(!leases.is_held(&digest));
    }
}
