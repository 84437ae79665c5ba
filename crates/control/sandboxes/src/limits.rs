//! Every limit of the daemon, asked in one place.
//!
//! An operation asks here before it takes its first resource and before any guest is stopped. The answer is a reservation
//! that counts until it is dropped, so every path gives it back: a [`VmSlot`] for each VM, a [`CutSlot`] for each cut, a
//! [`BuildSlot`] for each parent that is built, a [`MaintenanceSlot`] for a check or a compaction of the store. Counts are
//! those of reservations, never of what happens to be registered, so requests in parallel cannot pass a limit together.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forkd_api::ErrorCode;
use forkd_store::Store;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::Config;
use crate::error::Error;
use crate::node::Room;

/// Host memory in MiB that a starting child needs at least: the pages it writes until it is ready, and its VMM.
const CHILD_MIB: u64 = 12;
/// Checks and compactions of the store that may run at once: each reads a large part of it.
const MAINTENANCE: usize = 1;
/// Snapshots that may be packed or unpacked at once: each reads or writes whole machines.
const TRANSFERS: usize = 4;
/// Dockerfiles that may be built at once.
const IMAGE_BUILDS: usize = 4;

/// The limits, and what is reserved under them.
#[derive(Debug)]
pub struct Limits {
    max_vms: usize,
    max_vms_per_owner: usize,
    max_cuts: usize,
    max_builds: usize,
    reserve_mib: u64,
    counts: Arc<Mutex<Counts>>,
    cuts: Arc<Semaphore>,
    builds: Arc<Semaphore>,
    maintenance: Arc<Semaphore>,
    transfers: Arc<Semaphore>,
    image_builds: Arc<Semaphore>,
    draining: AtomicBool,
}

#[derive(Debug, Default)]
struct Counts {
    vms: usize,
    by_owner: HashMap<String, usize>,
    /// Memory that VMs have been promised and have not taken yet.
    promised_mib: u64,
}

impl Limits {
    /// The limits that the configuration sets.
    pub fn new(config: &Config) -> Self {
        Self {
            max_vms: config.max_sandboxes,
            max_vms_per_owner: config.max_sandboxes_per_token,
            max_cuts: config.branch_concurrency,
            max_builds: config.max_builds,
            reserve_mib: config.reserve_mib,
            counts: Arc::default(),
            cuts: Arc::new(Semaphore::new(config.branch_concurrency)),
            builds: Arc::new(Semaphore::new(config.max_builds)),
            maintenance: Arc::new(Semaphore::new(MAINTENANCE)),
            transfers: Arc::new(Semaphore::new(TRANSFERS)),
            image_builds: Arc::new(Semaphore::new(IMAGE_BUILDS)),
            draining: AtomicBool::new(false),
        }
    }

    /// Takes no new VM from now on, or takes them again.
    pub fn set_draining(&self, draining: bool) {
        self.draining.store(draining, Ordering::Relaxed);
    }

    /// The reserved and the free part of the host.
    pub fn room(&self) -> Room {
        let memory = Memory::of_host().unwrap_or_default();
        let counts = self.lock();
        let taken = self.reserve_mib + counts.promised_mib;
        Room {
            vms: counts.vms as u64,
            max_vms: self.max_vms as u64,
            memory_mib: memory.total_mib,
            free_mib: memory.available_mib.saturating_sub(taken),
            draining: self.draining.load(Ordering::Relaxed),
        }
    }

    /// Room for new children of one owner.
    pub fn children(&self, owner: &str, count: usize) -> Result<Vec<VmSlot>, Error> {
        self.vms(owner, count, CHILD_MIB, available_mib())
    }

    /// Room for a parent that boots, warms up and is cut. Asked before `forkd-image` makes anything for it;
    /// [`Self::promise_parent`] adds the memory once its size is known.
    pub fn build(&self, owner: &str, store: &Store) -> Result<BuildSlot, Error> {
        let permit = Arc::clone(&self.builds).try_acquire_owned().map_err(|_| {
            Error::hinted(
                ErrorCode::LimitReached,
                format!(
                    "{} parents are being built, that is the limit",
                    self.max_builds
                ),
                "try again later, or start the daemon with a higher --max-builds",
            )
        })?;
        self.store_room(store)?;
        let mut slots = self.vms(owner, 1, 0, available_mib())?;
        let vm = slots.pop().ok_or(Error::Task)?;
        Ok(BuildSlot {
            _vm: vm,
            memory: None,
            _permit: permit,
        })
    }

    /// Adds the memory of the parent to its reservation.
    pub fn promise_parent(&self, slot: &mut BuildSlot, memory_mib: u32) -> Result<(), Error> {
        let memory = self.promise(u64::from(memory_mib), available_mib())?;
        slot.memory = Some(memory);
        Ok(())
    }

    /// Counts a VM of an earlier daemon. A limit that was lowered meanwhile ends no VM that runs.
    pub fn adopted(&self, owner: &str) -> VmSlot {
        self.reserve(&mut self.lock(), owner, 0)
    }

    /// Room for a cut: a place among those under way, and a store below its limit.
    pub fn cut(&self, store: &Store) -> Result<CutSlot, Error> {
        let slot = Arc::clone(&self.cuts).try_acquire_owned().map_err(|_| {
            Error::hinted(
                ErrorCode::LimitReached,
                format!("{} cuts are under way, that is the limit", self.max_cuts),
                "try again in a moment, or start the daemon with a higher --branch-concurrency",
            )
        })?;
        self.store_room(store)?;
        Ok(CutSlot(slot))
    }

    /// Room for the memory that a live cut is copied to, until the host's own figures count it.
    pub fn live_cut(&self, mib: u64) -> Result<PromisedMemory, Error> {
        self.promise(mib, available_mib())
    }

    fn promise(&self, mib: u64, available: Option<u64>) -> Result<PromisedMemory, Error> {
        let mut counts = self.lock();
        self.check_memory(counts.promised_mib + mib, available)?;
        counts.promised_mib += mib;
        Ok(PromisedMemory {
            counts: Arc::clone(&self.counts),
            mib,
        })
    }

    fn check_memory(&self, promised: u64, available: Option<u64>) -> Result<(), Error> {
        let needed = self.reserve_mib + promised;
        match available {
            Some(available) if available < needed => Err(Error::hinted(
                ErrorCode::LimitReached,
                format!("{available} MiB of host memory are free, {needed} MiB are needed"),
                "delete sandboxes, or start the daemon with a lower --reserve-mib",
            )),
            _ => Ok(()),
        }
    }

    /// A turn at reading the whole store.
    pub fn maintenance(&self, store: Option<&Store>) -> Result<MaintenanceSlot, Error> {
        let slot = Arc::clone(&self.maintenance)
            .try_acquire_owned()
            .map_err(|_| {
                Error::hinted(
                    ErrorCode::Busy,
                    "the store is being checked or a snapshot is being compacted",
                    "try again when that has ended",
                )
            })?;
        store.map(|store| self.store_room(store)).transpose()?;
        Ok(MaintenanceSlot(slot))
    }

    /// A turn at packing or unpacking a snapshot.
    pub fn transfer(&self) -> Result<TransferSlot, Error> {
        let slot = Arc::clone(&self.transfers).try_acquire_owned();
        let slot = slot.map_err(|_| {
            Error::hinted(
                ErrorCode::Busy,
                format!("{TRANSFERS} snapshots are being packed or unpacked, that is the limit"),
                "try again when one of them has ended",
            )
        })?;
        Ok(TransferSlot(slot))
    }

    /// A turn at building a Dockerfile, or at exporting an image.
    pub fn image_build(&self) -> Result<OwnedSemaphorePermit, Error> {
        let slot = Arc::clone(&self.image_builds).try_acquire_owned();
        slot.map_err(|_| {
            Error::hinted(
                ErrorCode::Busy,
                format!("{IMAGE_BUILDS} images are being built or exported, that is the limit"),
                "try again when one of them has ended",
            )
        })
    }

    /// Refuses when the store is above its limit. The store keeps a running total, so this reads no disk.
    pub fn store_room(&self, store: &Store) -> Result<(), Error> {
        store
            .check_limit()
            .map_err(Error::store("there is no room for a snapshot"))
    }

    /// Cuts under way.
    pub fn cuts_under_way(&self) -> usize {
        self.max_cuts.saturating_sub(self.cuts.available_permits())
    }

    fn vms(
        &self,
        owner: &str,
        count: usize,
        mib_each: u64,
        available: Option<u64>,
    ) -> Result<Vec<VmSlot>, Error> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(Error::hinted(
                ErrorCode::ShuttingDown,
                "this host is drained and takes no new sandboxes",
                "use another host, or end the drain with PATCH /v1/node",
            ));
        }
        let mut counts = self.lock();
        if counts.vms + count > self.max_vms {
            return Err(Error::hinted(
                ErrorCode::LimitReached,
                format!(
                    "there are {} sandboxes, {} is the limit",
                    counts.vms, self.max_vms
                ),
                "delete some, or start the daemon with a higher --max-sandboxes",
            ));
        }
        let mine = counts.by_owner.get(owner).copied().unwrap_or(0);
        if mine + count > self.max_vms_per_owner {
            return Err(Error::hinted(
                ErrorCode::LimitReached,
                format!(
                    "{owner} has {mine} sandboxes, {} is the limit of one owner",
                    self.max_vms_per_owner
                ),
                "delete some, or start the daemon with a higher --max-sandboxes-per-token",
            ));
        }
        self.check_memory(counts.promised_mib + mib_each * count as u64, available)?;
        Ok((0..count)
            .map(|_| self.reserve(&mut counts, owner, mib_each))
            .collect())
    }

    fn reserve(&self, counts: &mut Counts, owner: &str, promised_mib: u64) -> VmSlot {
        counts.vms += 1;
        counts.promised_mib += promised_mib;
        *counts.by_owner.entry(owner.to_owned()).or_default() += 1;
        VmSlot {
            counts: Arc::clone(&self.counts),
            owner: owner.to_owned(),
            promised_mib,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock()
    }
}

/// One VM, from the moment it is asked for until nothing of it is left.
#[derive(Debug)]
pub struct VmSlot {
    counts: Arc<Mutex<Counts>>,
    owner: String,
    promised_mib: u64,
}

impl VmSlot {
    /// The VM has taken the memory it needs to start: the host's own figures count it from now on.
    pub fn started(&mut self) {
        let mut counts = self.counts.lock();
        counts.promised_mib -= self.promised_mib;
        self.promised_mib = 0;
    }
}

impl Drop for VmSlot {
    fn drop(&mut self) {
        self.started();
        let mut counts = self.counts.lock();
        counts.vms -= 1;
        if let Some(mine) = counts.by_owner.get_mut(&self.owner) {
            *mine -= 1;
            if *mine == 0 {
                counts.by_owner.remove(&self.owner);
            }
        }
    }
}

/// Memory that a live cut is about to take.
#[derive(Debug)]
pub struct PromisedMemory {
    counts: Arc<Mutex<Counts>>,
    mib: u64,
}

impl Drop for PromisedMemory {
    fn drop(&mut self) {
        let mut counts = self.counts.lock();
        counts.promised_mib -= self.mib;
    }
}

/// A parent that is being built.
#[derive(Debug)]
pub struct BuildSlot {
    _vm: VmSlot,
    memory: Option<PromisedMemory>,
    _permit: OwnedSemaphorePermit,
}

/// A cut under way.
#[derive(Debug)]
pub struct CutSlot(#[expect(dead_code, reason = "held until dropped")] OwnedSemaphorePermit);

/// A check or a compaction under way.
#[derive(Debug)]
pub struct MaintenanceSlot(
    #[expect(dead_code, reason = "held until dropped")] OwnedSemaphorePermit,
);

/// A snapshot that is being packed or unpacked.
#[derive(Debug)]
pub struct TransferSlot(#[expect(dead_code, reason = "held until dropped")] OwnedSemaphorePermit);

/// Memory that programs could still get.
fn available_mib() -> Option<u64> {
    Memory::of_host().map(|memory| memory.available_mib)
}

/// The memory of the host.
#[derive(Debug, Clone, Copy, Default)]
struct Memory {
    total_mib: u64,
    available_mib: u64,
}

impl Memory {
    fn of_host() -> Option<Self> {
        let text = std::fs::read_to_string("/proc/meminfo").ok()?;
        let mib = |name: &str| -> Option<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
            Some(kib / 1024)
        };
        Some(Self {
            total_mib: mib("MemTotal:")?,
            available_mib: mib("MemAvailable:")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn limits(max: usize, per_owner: usize) -> Limits {
        Limits::new(&Config {
            max_sandboxes: max,
            max_sandboxes_per_token: per_owner,
            max_builds: 1,
            ..Config::below(std::path::Path::new("/nowhere"))
        })
    }

    proptest! {
        #[test]
        fn reservations_never_pass_a_limit_and_all_come_back(
            steps in prop::collection::vec((0usize..3, 1usize..4, any::<bool>()), 0..60),
        ) {
            let limits = limits(7, 3);
            let mut held: Vec<(usize, Vec<VmSlot>)> = Vec::new();
            for (owner, count, give_back) in steps {
                if give_back && !held.is_empty() {
                    held.remove(owner % held.len());
                } else if let Ok(slots) = limits.vms(&owner.to_string(), count, 1, None) {
                    held.push((owner, slots));
                }
                let of = |who: usize| -> usize {
                    held.iter().filter(|(owner, _)| *owner == who).map(|(_, slots)| slots.len()).sum()
                };
                prop_assert!((0..3).all(|who| of(who) <= 3));
                prop_assert!((0..3).map(of).sum::<usize>() <= 7);
            }
            held.clear();
            let counts = limits.lock();
            prop_assert_eq!((counts.vms, counts.promised_mib, counts.by_owner.len()), (0, 0, 0));
        }
    }

    #[test]
    fn memory_that_was_promised_is_not_promised_again() {
        let limits = limits(10, 10);
        let mut first = limits.vms("a", 1, 100, Some(150)).unwrap();
        let error = limits.vms("a", 1, 100, Some(150)).unwrap_err();
        assert_eq!(error.code(), ErrorCode::LimitReached);
        // The host's figures know of it from here on.
        first[0].started();
        assert!(limits.vms("a", 1, 100, Some(150)).is_ok());
    }

    #[test]
    fn a_build_is_a_vm_and_one_of_few() {
        let limits = limits(1, 1);
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let mut build = limits.build("a", &store).unwrap();
        assert!(limits.build("b", &store).is_err());
        limits.promise_parent(&mut build, 1).unwrap();
        assert_eq!(limits.lock().promised_mib, 1);
        assert!(limits.children("b", 1).is_err());
        drop(build);
        assert_eq!(limits.lock().promised_mib, 0);
        assert!(limits.children("b", 1).is_ok());
    }
}
