//! Operations on stored snapshots: list, describe, share, delete, compact.
//!
//! A tag that is being written, or whose writing failed, is listed beside the stored ones. The use of the store and the
//! search for damage are here, too.

use std::sync::Arc;

use forkd_api::{
    ErrorCode, EventKind, FsckReport, SnapshotDetail, SnapshotInfo, SnapshotStatus, StoreUsage,
};
use forkd_store::{Deletion, Entry, Manifest, Origin};
use forkd_types::Tag;

use crate::app::App;
use crate::clock;
use crate::error::Error;
use crate::ops::branch;
use crate::ops::writing::Writing;
use crate::owners::Ownership;

/// A stored snapshot as the API shows it.
pub fn info(app: &App, manifest: &Manifest) -> SnapshotInfo {
    let physical: u64 = manifest
        .blobs()
        .iter()
        .map(|blob| app.store.physical(blob))
        .sum();
    let (branched_from, pause_us) = match &manifest.origin {
        Origin::Boot { .. } | Origin::Import { .. } => (None, None),
        Origin::Branch {
            sandbox, pause_us, ..
        } => (Some(sandbox.clone()), Some(*pause_us)),
        Origin::Compact { from } => (Some(format!("compact:{from}")), None),
    };
    let ownership = app.owners.get(&manifest.tag);
    SnapshotInfo {
        tag: manifest.tag.to_string(),
        dir: app
            .store
            .layout()
            .snapshot(&manifest.tag)
            .display()
            .to_string(),
        created_at_unix: manifest.created_at_unix,
        status: SnapshotStatus::Ready,
        bootable: true,
        branched_from,
        pause_ms: pause_us.map(|us| us.div_ceil(1000)),
        diff_ms: None,
        diff_physical_bytes: None,
        diff_logical_bytes: None,
        warning: None,
        parent_tag: manifest
            .parent
            .as_ref()
            .map(|parent| parent.tag.to_string()),
        memory_mib: Some(manifest.memory_mib),
        vcpus: Some(manifest.vcpus),
        image: Some(manifest.source.image.clone()),
        engine: Some(manifest.engine.to_string()),
        pause_us,
        physical_bytes: Some(physical),
        public: ownership.as_ref().is_some_and(|found| found.public),
        owner: ownership.map(|found| found.owner),
    }
}

/// A snapshot that is not in the store, as the API shows it.
pub fn writing_info(app: &App, tag: &Tag, writing: &Writing) -> SnapshotInfo {
    let ownership = app.owners.get(tag);
    SnapshotInfo {
        tag: tag.to_string(),
        dir: app.store.layout().snapshot(tag).display().to_string(),
        created_at_unix: writing.since_unix,
        status: if writing.failure.is_some() {
            SnapshotStatus::Failed
        } else {
            SnapshotStatus::Writing
        },
        bootable: false,
        branched_from: writing.branched_from.clone(),
        pause_ms: writing.pause_us.map(|us| us.div_ceil(1000)),
        diff_ms: None,
        diff_physical_bytes: None,
        diff_logical_bytes: None,
        warning: writing.failure.clone(),
        parent_tag: None,
        memory_mib: None,
        vcpus: None,
        image: None,
        engine: None,
        pause_us: writing.pause_us,
        physical_bytes: None,
        public: ownership.as_ref().is_some_and(|found| found.public),
        owner: ownership.map(|found| found.owner),
    }
}

/// The start of the tags of build steps.
pub const BUILD_STEP: &str = "build-";

/// Whether a tag is that of a build step: a key of the build cache. Lists leave these out.
pub fn is_build_step(tag: &Tag) -> bool {
    let key = tag.as_str().strip_prefix(BUILD_STEP);
    key.is_some_and(|key| key.len() == 40 && key.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Every snapshot, each once, in the order of their names.
pub async fn list(app: &Arc<App>) -> Result<Vec<SnapshotInfo>, Error> {
    app.blocking(|app| {
        // First, so that no tag is missed on its way from here to the store.
        let writing = app.writing.list();
        let held = |tag: &Tag| {
            let mut busy = writing
                .iter()
                .filter(|(_, writing)| writing.failure.is_none());
            busy.any(|(found, _)| found == tag)
        };
        let mut all: Vec<SnapshotInfo> = app
            .store
            .list()
            .iter()
            .filter(|entry| !held(entry.tag()) && !is_build_step(entry.tag()))
            .map(|entry| match entry {
                Entry::Whole(manifest) => info(app, manifest),
                Entry::Broken { tag, problem } => broken_info(app, tag, problem),
            })
            .collect();
        for (tag, writing) in &writing {
            if is_build_step(tag) {
                continue;
            }
            // Until the writer lets go of it, a tag is not there for others.
            if writing.failure.is_none() || !app.store.contains(tag) {
                all.push(writing_info(app, tag, writing));
            }
        }
        all.sort_by(|a, b| a.tag.cmp(&b.tag));
        Ok(all)
    })
    .await
}

fn broken_info(app: &App, tag: &Tag, problem: &str) -> SnapshotInfo {
    let writing = Writing {
        since_unix: 0,
        branched_from: None,
        pause_us: None,
        failure: Some(problem.to_owned()),
    };
    writing_info(app, tag, &writing)
}

/// Everything about one snapshot.
pub async fn detail(app: &Arc<App>, tag: Tag) -> Result<SnapshotDetail, Error> {
    if app.writing.is_writing(&tag) {
        return Err(Error::StillWriting { tag });
    }
    app.blocking(move |app| {
        let detail = app
            .store
            .detail(&tag)
            .map_err(Error::store(format!("snapshot {tag} cannot be described")))?;
        let names = |tags: &[Tag]| tags.iter().map(ToString::to_string).collect();
        let manifest = &detail.manifest;
        Ok(SnapshotDetail {
            tag: tag.to_string(),
            dir: app.store.layout().snapshot(&tag).display().to_string(),
            created_at_unix: Some(manifest.created_at_unix),
            memory_logical_bytes: u64::from(manifest.memory_mib) << 20,
            memory_physical_bytes: detail.memory_physical,
            vmstate_bytes: manifest.state.bytes,
            parent_tag: manifest
                .parent
                .as_ref()
                .map(|parent| parent.tag.to_string()),
            parent_content_hash: manifest
                .parent
                .as_ref()
                .map(|parent| parent.digest.to_string()),
            chain_depth: u32::try_from(detail.ancestors.len()).unwrap_or(u32::MAX),
            dependents: names(&detail.dependents),
            ancestors: names(&detail.ancestors),
            content_hash: Some(manifest.digest().to_string()),
            disk_physical_bytes: detail.disk_physical,
            unique_bytes: detail.unique,
            vcpus: Some(manifest.vcpus),
            image: Some(manifest.source.image.clone()),
            disk_layers: manifest.disks.iter().map(|d| d.layers.len() as u32).sum(),
            memory_layers: manifest.memory.layers.len() as u32,
            labels: manifest.labels.clone(),
        })
    })
    .await
}

/// Deletes a snapshot. Cancels the build of a parent, and waits until its VM is gone.
pub async fn delete(app: &Arc<App>, tag: Tag, deletion: Deletion) -> Result<(), Error> {
    if let Some(ended) = app.writing.cancel(&tag) {
        ended.cancelled().await;
    }
    if app.writing.is_writing(&tag) {
        return Err(Error::StillWriting { tag });
    }
    let noted = app.writing.forget_failed(&tag);
    let result = {
        let tag = tag.clone();
        app.blocking(move |app| {
            let gone = app
                .store
                .delete(&tag, deletion)
                .map_err(Error::store(format!("snapshot {tag} was not deleted")))?;
            app.sweep_touched();
            Ok(gone)
        })
        .await
    };
    let gone = match result {
        Err(error) if noted && error.code() == ErrorCode::SnapshotNotFound => return Ok(()),
        other => other?,
    };
    for tag in &gone {
        app.events.tell(EventKind::SnapshotDeleted, tag, None);
    }
    app.owners.forget(gone).await?;
    Ok(())
}

/// Every snapshot that builds on this one, directly or not.
pub async fn all_dependents(app: &Arc<App>, tag: &Tag) -> Result<Vec<Tag>, Error> {
    let tag = tag.clone();
    app.blocking(move |app| {
        let mut found: Vec<Tag> = Vec::new();
        let mut open = vec![tag];
        while let Some(next) = open.pop() {
            let detail = app
                .store
                .detail(&next)
                .map_err(Error::store(format!("snapshot {next} cannot be described")))?;
            for dependent in detail.dependents {
                if !found.contains(&dependent) {
                    found.push(dependent.clone());
                    open.push(dependent);
                }
            }
        }
        Ok(found)
    })
    .await
}

/// Shows a snapshot to every owner, or to its own only.
pub async fn set_public(app: &Arc<App>, tag: &Tag, public: bool) -> Result<(), Error> {
    let owner = app.owners.get(tag).map(|found| found.owner);
    let owner = owner.ok_or_else(|| {
        Error::refused(
            ErrorCode::WrongState,
            format!("snapshot {tag} has no owner"),
        )
    })?;
    Ok(app.owners.set(tag, Ownership { owner, public }).await?)
}

/// Makes a snapshot without a parent from one that has parents. Content is shared, so this costs little.
pub async fn compact(
    app: &Arc<App>,
    from: Tag,
    to: Tag,
    owner: &str,
) -> Result<SnapshotInfo, Error> {
    if from == to {
        return Err(Error::refused(
            ErrorCode::InvalidRequest,
            format!("{from} cannot be compacted onto itself"),
        ));
    }
    let slot = app.limits.maintenance(Some(&app.store))?;
    let claimed = branch::claim(app, &to, owner, Some(format!("compact:{from}"))).await?;
    app.blocking(move |app| {
        // Held by the work, which goes on if the client leaves.
        let _held = (slot, claimed);
        let source = app
            .store
            .get(&from)
            .map_err(Error::store(format!("snapshot {from} was not compacted")))?;
        let flat = crate::ops::compact::flatten_memory(app, &source.manifest)?;
        let disks = crate::ops::compact::flatten_disks(app, &source.manifest)?;
        let mut manifest = (*source.manifest).clone();
        manifest.tag = to.clone();
        manifest.created_at_unix = clock::unix();
        manifest.parent = None;
        manifest.origin = Origin::Compact { from };
        if let Some(flat) = &flat {
            manifest.memory = forkd_store::MemoryManifest {
                layers: vec![flat.blob],
                index: None,
            };
        }
        for (disk, flat) in manifest.disks.iter_mut().zip(&disks) {
            if let Some(flat) = flat {
                disk.layers = vec![flat.blob];
            }
        }
        let published = app
            .store
            .publish(manifest)
            .map_err(Error::store(format!("snapshot {to} was not stored")))?;
        Ok(info(app, &published.manifest))
    })
    .await
}

/// Counts the content of the store.
pub async fn usage(app: &Arc<App>) -> Result<StoreUsage, Error> {
    app.blocking(|app| {
        let usage = app
            .store
            .usage()
            .map_err(Error::store("the store cannot be measured"))?;
        Ok(StoreUsage {
            dir: app.store.layout().root().display().to_string(),
            snapshots: usage.snapshots,
            blobs: usage.blobs,
            physical_bytes: usage.physical,
            logical_bytes: usage.logical,
            free_bytes: usage.free,
            limit_bytes: app.store.limit(),
        })
    })
    .await
}

/// Looks for damage.
pub async fn fsck(app: &Arc<App>, deep: bool) -> Result<FsckReport, Error> {
    let slot = app.limits.maintenance(None)?;
    app.blocking(move |app| {
        let _slot = slot;
        let found = app
            .store
            .fsck(deep)
            .map_err(Error::store("the store cannot be checked"))?;
        Ok(FsckReport {
            snapshots: found.snapshots,
            blobs_checked: found.blobs_checked,
            problems: found.problems,
            repaired: found.repaired,
        })
    })
    .await
}
