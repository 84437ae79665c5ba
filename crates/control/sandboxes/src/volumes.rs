//! Volumes: named disks that outlive the sandboxes that use them.
//!
//! ```text
//!   volume = base + frozen layers          content of the store, held by a lease
//!   rw      one sandbox writes; its layer joins the volume when its VM has ended
//!   clone   a private layer over the volume of the moment, thrown away unless it is committed
//!   ro      the same, mounted for reading
//! ```
//!
//! [`Volumes`] is the one place that changes a volume. A change is durable before any client learns of it. Invariant: while
//! a volume has a writer, only that sandbox moves its content.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use forkd_api::{ErrorCode, VolumeInfo, VolumeMode};
use forkd_store::{BlobRef, Lease, Store};
use forkd_types::{SandboxId, Tag};

use crate::error::Error;
use crate::state::{Db, DbError, DiskStack, LayerRef, VolumeRecord, VolumeUse};

/// Volumes of one daemon.
const MOST: usize = 4096;
/// Layers of a volume before a new writer or clone merges them.
pub const MERGE_AT: usize = 12;

/// The volumes of the daemon, by name.
#[derive(Debug)]
pub struct Volumes {
    db: Db,
    all: Mutex<BTreeMap<Tag, Entry>>,
    /// Changes happen one after another, so that a row never goes back.
    order: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct Entry {
    record: VolumeRecord,
    /// Keeps the content.
    _lease: Lease,
}

/// A wish of a sandbox for a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeWish {
    pub name: Tag,
    /// Where the guest mounts it.
    pub path: String,
    pub mode: VolumeMode,
}

impl Volumes {
    /// Reads the table. The content is held from now on.
    pub fn open(db: &Db, store: &Store) -> Result<Self, DbError> {
        let records = db.volumes_at_start()?;
        let entries = records.into_iter().map(|record| {
            let name = record.name.clone();
            (name, Entry::new(store, record))
        });
        Ok(Self {
            db: db.clone(),
            all: Mutex::new(entries.collect()),
            order: tokio::sync::Mutex::default(),
        })
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<Tag, Entry>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The volumes that have a writer, with it.
    pub fn written(&self) -> Vec<(Tag, SandboxId)> {
        let all = self.all();
        let writers = all.iter().filter_map(|(name, entry)| {
            let writer = entry.record.writer.clone()?;
            Some((name.clone(), writer))
        });
        writers.collect()
    }

    /// The volumes that an actor may see, by name.
    pub fn list(&self, owns: impl Fn(&str) -> bool) -> Vec<VolumeRecord> {
        let all = self.all();
        let records = all.values().map(|entry| &entry.record);
        records
            .filter(|record| owns(&record.owner))
            .cloned()
            .collect()
    }

    /// A volume that the actor may use. One of another owner does not exist for the actor.
    pub fn get(&self, name: &Tag, owns: impl Fn(&str) -> bool) -> Result<VolumeRecord, Error> {
        let all = self.all();
        let found = all.get(name).map(|entry| &entry.record);
        found
            .filter(|record| owns(&record.owner))
            .cloned()
            .ok_or_else(|| no_volume(name))
    }

    /// Enters a new volume.
    pub async fn add(&self, store: &Store, record: VolumeRecord) -> Result<(), Error> {
        let _order = self.order.lock().await;
        {
            let all = self.all();
            if all.contains_key(&record.name) {
                return Err(Error::hinted(
                    ErrorCode::AlreadyExists,
                    format!("there is already a volume {}", record.name),
                    "choose another name, or delete that one first",
                ));
            }
            if all.len() >= MOST {
                return Err(Error::refused(
                    ErrorCode::LimitReached,
                    format!("a daemon has at most {MOST} volumes"),
                ));
            }
        }
        self.put(store, record).await
    }

    /// Removes a volume that no sandbox writes. Clones keep their content.
    pub async fn remove(&self, name: &Tag, owns: impl Fn(&str) -> bool) -> Result<(), Error> {
        let _order = self.order.lock().await;
        let record = self.get(name, owns)?;
        if let Some(writer) = record.writer {
            return Err(in_use(name, &writer));
        }
        self.db.delete_volume(name.clone()).await?;
        self.all().remove(name);
        Ok(())
    }

    /// Makes a sandbox the writer of a volume. The answer is the volume as the sandbox finds it.
    pub async fn claim(
        &self,
        store: &Store,
        name: &Tag,
        sandbox: &SandboxId,
    ) -> Result<VolumeRecord, Error> {
        let _order = self.order.lock().await;
        let mut record = self.get(name, |_| true)?;
        if let Some(writer) = &record.writer {
            return Err(in_use(name, writer));
        }
        record.writer = Some(sandbox.clone());
        self.put(store, record.clone()).await?;
        Ok(record)
    }

    /// Ends the right of a sandbox to write, with the layers that the sandbox left. A sandbox that is not the writer
    /// changes nothing, so a second call does no harm.
    pub async fn release(
        &self,
        store: &Store,
        sandbox: &SandboxId,
        name: &Tag,
        content: Option<Content>,
    ) -> Result<(), Error> {
        let _order = self.order.lock().await;
        let Ok(mut record) = self.get(name, |_| true) else {
            return Ok(());
        };
        if record.writer.as_ref() != Some(sandbox) {
            return Ok(());
        }
        record.writer = None;
        if let Some(content) = &content {
            content.enter(&mut record);
        }
        self.put(store, record).await
    }

    /// Makes content the content of a volume, if the volume is still at `generation`. The answer is the new generation.
    pub async fn commit(
        &self,
        store: &Store,
        sandbox: &SandboxId,
        name: &Tag,
        generation: u64,
        content: Content,
    ) -> Result<VolumeRecord, Error> {
        let _order = self.order.lock().await;
        let mut record = self.get(name, |_| true)?;
        if let Some(writer) = record.writer.as_ref().filter(|writer| *writer != sandbox) {
            return Err(in_use(name, writer));
        }
        if record.generation != generation {
            return Err(Error::hinted(
                ErrorCode::VolumeConflict,
                format!(
                    "volume {name} has changed: it is at generation {}, the clone in {sandbox} was made of {generation}",
                    record.generation
                ),
                "copy the changes into a new clone, or commit to another volume",
            ));
        }
        content.enter(&mut record);
        self.put(store, record.clone()).await?;
        Ok(record)
    }

    /// Writes a record down and holds its content. The caller has the order.
    async fn put(&self, store: &Store, record: VolumeRecord) -> Result<(), Error> {
        let entry = Entry::new(store, record.clone());
        self.db.put_volume(record.clone()).await?;
        self.all().insert(record.name, entry);
        Ok(())
    }
}

impl Entry {
    fn new(store: &Store, record: VolumeRecord) -> Self {
        Self {
            _lease: store.hold(record.blobs()),
            record,
        }
    }
}

/// New content of a volume, durable in the store.
#[derive(Debug)]
pub struct Content {
    pub base: BlobRef,
    pub layers: Vec<BlobRef>,
    pub clean: bool,
    /// Keeps the content until the volume holds it.
    pub leases: Vec<Lease>,
}

impl Content {
    fn enter(&self, record: &mut VolumeRecord) {
        record.clean = self.clean;
        if record.layers == self.layers && record.base == self.base {
            return;
        }
        record.base = self.base;
        record.layers.clone_from(&self.layers);
        record.generation += 1;
    }
}

impl VolumeRecord {
    /// The disk of a sandbox that uses the volume, and the entry of its record.
    pub fn used(&self, wish: &VolumeWish, slot: usize) -> (DiskStack, VolumeUse) {
        let disk = DiskStack {
            base: self.base,
            layers: self.layers.iter().copied().map(LayerRef::Blob).collect(),
            read_only: false,
            serial: format!("forkd-volume-{slot}"),
        };
        let used = VolumeUse {
            name: self.name.clone(),
            path: wish.path.clone(),
            mode: wish.mode,
            slot,
            generation: self.generation,
        };
        (disk, used)
    }

    pub fn info(&self) -> VolumeInfo {
        VolumeInfo {
            name: self.name.to_string(),
            owner: self.owner.clone(),
            size_mib: self.bytes >> 20,
            created_at_unix: self.created_at_unix,
            generation: self.generation,
            layers: self.layers.len() as u32,
            clean: self.clean,
            writer: self.writer.as_ref().map(ToString::to_string),
        }
    }
}

fn no_volume(name: &Tag) -> Error {
    Error::hinted(
        ErrorCode::VolumeNotFound,
        format!("there is no volume {name}"),
        format!("create it with `forkd volume create {name}`; `forkd volume ls` lists all"),
    )
}

fn in_use(name: &Tag, writer: &SandboxId) -> Error {
    Error::hinted(
        ErrorCode::VolumeInUse,
        format!("sandbox {writer} writes volume {name}"),
        "wait for that sandbox to end, or use a clone (mode \"clone\") or the last state (mode \"ro\")",
    )
}
