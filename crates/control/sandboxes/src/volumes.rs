//! Volumes: named disks that outlive the sandboxes that use them.
//!
//! ```text
//!   volume = base + frozen layers          content of the store, held by a lease
//!   rw      one sandbox writes; its layer joins the volume when its VM has ended
//!   clone   a private layer over the volume of the moment, thrown away unless it is committed
//!   ro      the same, mounted for reading
//! ```
//!
//! [`Volumes`] is the one place that changes a volume. A change is durable before any client learns of it. Invariants: while
//! a volume has a writer, only that sandbox changes its content; every change of the content raises the generation.

use std::collections::BTreeMap;
use std::sync::Arc;

use forkd_api::{ErrorCode, VolumeInfo, VolumeMode};
use forkd_store::{BlobRef, Lease, Store};
use forkd_types::{SandboxId, Tag};
use parking_lot::Mutex;

use crate::error::Error;
use crate::state::{Db, DbError, DiskStack, LayerRef, VolumeRecord, VolumeUse};

/// Volumes of one daemon.
const MOST: usize = 4096;
/// Layers of a volume. The next use of a volume with more merges them.
pub const MOST_LAYERS: usize = 12;

/// The volumes of the daemon, by name.
#[derive(Debug)]
pub struct Volumes {
    db: Db,
    all: Mutex<BTreeMap<Tag, Entry>>,
    /// Changes happen one after another, so that a row never goes back.
    order: tokio::sync::Mutex<()>,
    /// Content of sandboxes whose changes could not be taken over. The next start of the daemon repeats that.
    unfinished: Mutex<Vec<Lease>>,
}

#[derive(Debug)]
struct Entry {
    record: VolumeRecord,
    /// Keeps the content.
    lease: Arc<Lease>,
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
            unfinished: Mutex::default(),
        })
    }

    /// The volumes that have a writer, with it.
    pub fn written(&self) -> Vec<(Tag, SandboxId)> {
        let all = self.all.lock();
        let writers = all.iter().filter_map(|(name, entry)| {
            let writer = entry.record.writer.clone()?;
            Some((name.clone(), writer))
        });
        writers.collect()
    }

    /// The volumes that an actor may see, by name.
    pub fn list(&self, owns: impl Fn(&str) -> bool) -> Vec<VolumeRecord> {
        let all = self.all.lock();
        let records = all.values().map(|entry| &entry.record);
        records
            .filter(|record| owns(&record.owner))
            .cloned()
            .collect()
    }

    /// A volume that the actor may use. One of another owner does not exist for the actor.
    pub fn get(&self, name: &Tag, owns: impl Fn(&str) -> bool) -> Result<VolumeRecord, Error> {
        let all = self.all.lock();
        let found = all.get(name).map(|entry| &entry.record);
        found
            .filter(|record| owns(&record.owner))
            .cloned()
            .ok_or_else(|| no_volume(name))
    }

    /// A volume with a lease on its content.
    pub fn held(&self, name: &Tag) -> Result<(VolumeRecord, Arc<Lease>), Error> {
        let all = self.all.lock();
        let entry = all.get(name).ok_or_else(|| no_volume(name))?;
        Ok((entry.record.clone(), Arc::clone(&entry.lease)))
    }

    /// Keeps content until the daemon ends: it belongs to a sandbox whose changes could not be taken over.
    pub fn keep(&self, content: Lease) {
        self.unfinished.lock().push(content);
    }

    /// Whether a sandbox is the writer of a volume.
    pub fn is_writer(&self, sandbox: &SandboxId, used: &VolumeUse) -> bool {
        let all = self.all.lock();
        let record = all.get(&used.name).map(|entry| &entry.record);
        record.is_some_and(|record| {
            record.id == used.volume && record.writer.as_ref() == Some(sandbox)
        })
    }

    /// Enters a new volume.
    pub async fn add(&self, store: &Store, record: VolumeRecord) -> Result<(), Error> {
        let _order = self.order.lock().await;
        self.check_free(&record.name)?;
        self.put(store, record).await
    }

    /// Refuses a name that is in use, and a volume too many.
    pub fn check_free(&self, name: &Tag) -> Result<(), Error> {
        let all = self.all.lock();
        if all.contains_key(name) {
            return Err(Error::hinted(
                ErrorCode::AlreadyExists,
                format!("there is already a volume {name}"),
                "choose another name, or delete that volume first",
            ));
        }
        if all.len() >= MOST {
            return Err(Error::hinted(
                ErrorCode::LimitReached,
                format!("a daemon has at most {MOST} volumes"),
                "delete a volume that is not used any more (forkd volume rm)",
            ));
        }
        Ok(())
    }

    /// Removes a volume that no sandbox writes. Clones keep their content.
    pub async fn remove(&self, name: &Tag, owns: impl Fn(&str) -> bool) -> Result<(), Error> {
        let _order = self.order.lock().await;
        let record = self.get(name, owns)?;
        if let Some(writer) = record.writer {
            return Err(in_use(name, &writer));
        }
        self.db.delete_volume(name.clone()).await?;
        self.all.lock().remove(name);
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

    /// Makes content the content of a volume. A sandbox that is not the writer must have begun with the content that the
    /// volume still has.
    pub async fn commit(
        &self,
        store: &Store,
        sandbox: &SandboxId,
        used: &VolumeUse,
        content: Content,
    ) -> Result<VolumeRecord, Error> {
        let _order = self.order.lock().await;
        let mut record = self.committable(sandbox, used)?;
        content.enter(&mut record);
        self.put(store, record.clone()).await?;
        Ok(record)
    }

    /// The volume, if a commit by this sandbox is allowed now.
    pub fn committable(
        &self,
        sandbox: &SandboxId,
        used: &VolumeUse,
    ) -> Result<VolumeRecord, Error> {
        let record = self.get(&used.name, |_| true)?;
        if record.id != used.volume {
            return Err(conflict(format!(
                "volume {} is not the one that {sandbox} cloned: that one was deleted",
                used.name
            )));
        }
        match &record.writer {
            Some(writer) if writer == sandbox => Ok(record),
            Some(writer) => Err(in_use(&used.name, writer)),
            None if record.generation == used.generation => Ok(record),
            None => Err(conflict(format!(
                "volume {} has changed: it is at generation {}, the clone in {sandbox} was made of {}",
                used.name, record.generation, used.generation
            ))),
        }
    }

    /// Replaces the layers of a volume by one that reads the same, unless the volume has changed or a sandbox other than
    /// `user` writes it.
    pub async fn shorten(
        &self,
        store: &Store,
        user: &SandboxId,
        old: &VolumeRecord,
        merged: BlobRef,
    ) -> Result<(), Error> {
        let _order = self.order.lock().await;
        let mut record = self.get(&old.name, |_| true)?;
        let same = record.id == old.id && record.layers == old.layers;
        let free = record.writer.as_ref().is_none_or(|writer| writer == user);
        if !same || !free {
            return Ok(());
        }
        record.layers = vec![merged];
        self.put(store, record).await
    }

    /// Writes a record down and holds its content. The caller has the order.
    async fn put(&self, store: &Store, record: VolumeRecord) -> Result<(), Error> {
        let entry = Entry::new(store, record.clone());
        self.db.put_volume(record.clone()).await?;
        self.all.lock().insert(record.name, entry);
        Ok(())
    }
}

impl Entry {
    fn new(store: &Store, record: VolumeRecord) -> Self {
        Self {
            lease: Arc::new(store.hold(record.blobs())),
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
            volume: self.id,
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

fn conflict(message: String) -> Error {
    Error::hinted(
        ErrorCode::VolumeConflict,
        message,
        "copy the changes into a sandbox with a new clone and commit that one",
    )
}

fn in_use(name: &Tag, writer: &SandboxId) -> Error {
    Error::hinted(
        ErrorCode::VolumeInUse,
        format!("sandbox {writer} writes volume {name}"),
        "wait for that sandbox to end, or use a clone (mode \"clone\") or the last state (mode \"ro\")",
    )
}
