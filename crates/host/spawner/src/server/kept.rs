//! Descriptors that a controller leaves here for its successor.
//!
//! Volatile content of sandboxes exists only as descriptors. A copy of each stays here, so that a controller that dies
//! takes nothing with it. The controller releases a name when nothing uses it any more; all end with this process, as
//! the VMs do.

use std::os::fd::OwnedFd;

use forkd_types::Digest;
use forkd_vmm_proto::spawn::{FromSpawn, MAX_BATCH, MAX_KEPT, SpawnError, SpawnReply};

use super::{Server, within};

impl Server {
    /// Keeps one descriptor for each name, or none.
    pub(super) fn keep(
        &mut self,
        names: Vec<Digest>,
        fds: Vec<OwnedFd>,
    ) -> Result<SpawnReply, SpawnError> {
        within("the number of names", names.len() as u64, MAX_BATCH as u64)?;
        let total = self.kept.len() + names.len();
        within("the number of kept files", total as u64, MAX_KEPT as u64)?;
        if fds.len() != names.len() {
            return Err(SpawnError::Descriptors {
                names: names.len() as u32,
                found: fds.len() as u32,
            });
        }
        self.kept.extend(names.into_iter().zip(fds));
        Ok(SpawnReply::Done)
    }

    /// Closes descriptors. A name that is not kept is no error.
    pub(super) fn release(&mut self, names: &[Digest]) -> SpawnReply {
        for name in names {
            self.kept.remove(name);
        }
        SpawnReply::Done
    }

    pub(super) fn kept(&mut self, client: u64, seq: u64, after: Option<&Digest>) {
        let mut names = Vec::new();
        let mut fds = Vec::new();
        let mut rest = self
            .kept
            .iter()
            .filter(|(name, _)| after.is_none_or(|after| *name > after));
        for (name, fd) in rest.by_ref().take(MAX_BATCH) {
            let Ok(copy) = fd.try_clone() else {
                continue;
            };
            names.push(*name);
            fds.push(copy);
        }
        let more = rest.next().is_some();
        let result = Ok(SpawnReply::Kept { names, more });
        self.send(client, &FromSpawn::Response { seq, result }, fds);
    }
}
