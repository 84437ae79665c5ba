//! From the files of a cut to its destination.
//!
//! The files become content of the store, or volatile content for a live fork, and the record of the sandbox names that
//! content in their place. Only `Cut::publish` decides whether the content gets a tag and becomes durable.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use forkd_store::{
    BlobRef, DiskManifest, Ingested, Manifest, MemoryManifest, Origin, SCHEMA, Versions,
    VolumeClone,
};
use forkd_types::Digest;
use forkd_vmm_proto::CutReport;

use super::files::CutFiles;
use super::live;
use super::{Cut, CutDone, CutMode, Destination};
use crate::app::App;
use crate::clock;
use crate::error::Error;
use crate::launch::check_budget;
use crate::ops::snapshots;
use crate::sandbox::layers;
use crate::state::{BuiltRecord, DiskStack, LayerRef, SandboxRecord, VolumeUse};

/// The content that a cut left.
struct Content {
    state: Ingested,
    memory: Ingested,
    index: Option<Ingested>,
    /// Frozen layers that were files of the sandbox, by name.
    layers: Vec<(String, Ingested)>,
    /// Blobs of volatile content that the sandbox used before, by the name of that content.
    from_volatile: Vec<(Digest, Ingested)>,
}

impl Cut<'_> {
    /// Turns what was written into content, records that the frozen layers are content now, and reaches the destination.
    pub(super) async fn publish(
        &mut self,
        record: &SandboxRecord,
        files: CutFiles,
        report: &CutReport,
        started: Instant,
    ) -> Result<CutDone, Error> {
        let app = Arc::clone(&self.owner.app);
        // Decides whether the content gets a name and becomes durable.
        let named = self.destination.tag().is_some();
        let content = {
            let record = record.clone();
            app.blocking(move |app| ingest(app, &record, &files, named))
                .await?
        };
        if !named {
            // A later daemon needs the memory and the disks. The state is used by the children that start now.
            // Layers of volumes that the source writes are content of the store.
            let layers = content.layers.iter().map(|(_, layer)| layer);
            let layers = layers.filter(|layer| app.store.is_volatile(&layer.blob.digest));
            let kept = layers.chain(&content.index).chain([&content.memory]);
            live::keep(&app, kept).await?;
        }
        self.settle(&content).await?;
        layers::shorten(self.owner).await?;
        let record = self.owner.sandbox.record();
        let manifest = self.manifest(&record, &content, report, started);
        let path = named.then(|| app.store.layout().blob(&content.memory.blob.digest));
        let built = BuiltRecord {
            image: report.image,
            memory: manifest.memory.clone(),
        };
        check_budget(&manifest)?;
        let published = app
            .blocking(move |app| {
                let published = match named {
                    true => app.store.publish(manifest),
                    false => app.store.unnamed(manifest),
                };
                published.map_err(Error::store("the snapshot could not be stored"))
            })
            .await?;
        let record = self
            .owner
            .save(|record| {
                record.branch_count += 1;
                record.built = Some(built);
                if let Some(path) = path {
                    record.last_branch_memory_path = Some(path.display().to_string());
                }
            })
            .await?;
        self.owner.lease = app.store.hold(record.blobs());
        let mut info = snapshots::info(&app, &published.manifest);
        if self.mode == CutMode::Diff {
            info.diff_ms = Some(report.total_us.saturating_sub(report.pause_us) / 1000);
            info.diff_physical_bytes = Some(report.pages_written * forkd_types::PAGE_SIZE);
            info.diff_logical_bytes = Some(u64::from(published.manifest.memory_mib) << 20);
        }
        Ok(CutDone { published, info })
    }

    /// Replaces files of the sandbox by content in its record, and then removes their old names.
    async fn settle(&mut self, content: &Content) -> Result<(), Error> {
        let frozen: Vec<(String, BlobRef)> = content
            .layers
            .iter()
            .map(|(name, layer)| (name.clone(), layer.blob))
            .collect();
        let record = self
            .owner
            .save(|record| {
                for (name, blob) in &frozen {
                    record.layer_is_content(name, *blob);
                }
                for (name, blob) in &content.from_volatile {
                    record.replace_content(name, blob.blob);
                }
            })
            .await?;
        self.owner.lease = self.owner.app.store.hold(record.blobs());
        let names = frozen.into_iter().map(|(name, _)| name).collect();
        layers::remove_files(self.owner, names).await
    }

    fn manifest(
        &self,
        record: &SandboxRecord,
        content: &Content,
        report: &CutReport,
        started: Instant,
    ) -> Manifest {
        let memory = match &content.index {
            Some(index) => {
                let mut layers = self.base(record).0.layers.clone();
                layers.push(content.memory.blob);
                MemoryManifest {
                    layers,
                    index: Some(index.blob),
                }
            }
            None => MemoryManifest {
                layers: vec![content.memory.blob],
                index: None,
            },
        };
        let (origin, labels) = match &self.destination {
            Destination::Parent { about, .. } => (
                Origin::Boot {
                    ready_us: about.ready_us,
                },
                about.labels.clone(),
            ),
            Destination::Tag { .. } | Destination::Live | Destination::Suspend { .. } => (
                Origin::Branch {
                    sandbox: record.id.to_string(),
                    pause_us: report.pause_us,
                    total_us: clock::micros(started.elapsed()),
                    pages: report.pages_written,
                },
                BTreeMap::new(),
            ),
        };
        Manifest {
            schema: SCHEMA,
            // A live cut has no name of its own: its children descend from what the source was started from.
            tag: self.destination.tag().unwrap_or(&record.tag).clone(),
            created_at_unix: clock::unix(),
            engine: record.engine,
            memory_mib: record.memory_mib,
            vcpus: record.vcpus,
            cpu: record.cpu,
            state: content.state.blob,
            memory,
            disks: record.disks.iter().map(frozen_disk).collect(),
            source: record.source.clone(),
            parent: (self.mode == CutMode::Diff).then(|| record.as_parent()),
            origin,
            versions: Versions {
                forkd: env!("CARGO_PKG_VERSION").to_owned(),
                vmm: env!("CARGO_PKG_VERSION").to_owned(),
                agent: record.agent.clone(),
                numpy: record.numpy.clone(),
            },
            labels,
            spare_disks: record.spare_disks,
            volumes: record.volumes.iter().map(cloned).collect(),
        }
    }
}

/// A volume of the source is a clone in children of the cut.
fn cloned(used: &VolumeUse) -> VolumeClone {
    VolumeClone {
        name: used.name.clone(),
        path: used.path.clone(),
        slot: used.slot,
        volume: used.volume,
        generation: used.generation,
    }
}

fn ingest(
    app: &App,
    record: &SandboxRecord,
    files: &CutFiles,
    named: bool,
) -> Result<Content, Error> {
    let enter = |file: &File, stored: bool| {
        let entered = if stored {
            app.store.ingest_file(file)
        } else {
            app.store.enter_volatile(file)
        };
        entered.map_err(Error::store("the cut could not be stored"))
    };
    let state = enter(&files.state, named)?;
    let memory = enter(&files.memory, named)?;
    let index = files.index.as_ref().map(|file| enter(file, named));
    let index = index.transpose()?;
    let dir = app.dirs.vm(&record.id);
    let new = files.layer_names();
    let mut layers = Vec::new();
    let mut durable = Vec::new();
    for (slot, disk) in record.disks.iter().enumerate() {
        // The guest has synced data there, and the row of the sandbox names the content next.
        let written_volume = record.writes_volume(slot);
        for layer in &disk.layers {
            if let LayerRef::Own(name) = layer
                && !new.contains(name)
            {
                let path = dir.join(name);
                let file = File::open(&path).map_err(Error::io("open", &path))?;
                let entered = enter(&file, named || written_volume)?;
                durable.extend(written_volume.then_some(entered.blob.digest));
                layers.push((name.clone(), entered));
            }
        }
    }
    if !durable.is_empty() {
        let synced = app.store.sync(durable);
        synced.map_err(Error::store("the cut could not be stored"))?;
    }
    let mut from_volatile = Vec::new();
    if named {
        // The index of an earlier cut is not part of this one, but its name goes with the layers.
        for name in record.blobs() {
            let blob = app.store.ingest_volatile(&name);
            let blob = blob.map_err(Error::store("the cut could not be stored"))?;
            from_volatile.extend(blob.map(|blob| (name, blob)));
        }
    }
    Ok(Content {
        state,
        memory,
        index,
        layers,
        from_volatile,
    })
}

/// The disk without the layers that came into use with the cut: all others are content by now.
fn frozen_disk(disk: &DiskStack) -> DiskManifest {
    DiskManifest {
        base: disk.base,
        layers: disk.frozen(),
        read_only: disk.read_only,
        serial: disk.serial.clone(),
    }
}
