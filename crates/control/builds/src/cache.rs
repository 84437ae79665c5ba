//! Results of steps that are kept: snapshots whose tag is the key, and archives of cache mounts.
//!
//! ```text
//! build-cache/steps/TAG      empty; its time is that of the last use
//! build-cache/mounts/KEY     the content of a cache mount as tar, which begins with no version: tar has its own magic
//! ```
//!
//! When both together take more than [`MAX_BYTES`], the entries that were used least recently go.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::ops::snapshots;
use forkd_store::Deletion;
use forkd_types::Tag;

/// Bytes that the cache may take.
const MAX_BYTES: u64 = 10 << 30;

fn folder(app: &App, kind: &str) -> PathBuf {
    app.config.data_dir.join("build-cache").join(kind)
}

/// Where the content of a cache mount is kept.
pub fn mount_file(app: &App, owner: &str, id: &str) -> PathBuf {
    let key = blake3::hash(format!("{owner}\n{id}").as_bytes()).to_hex();
    folder(app, "mounts").join(key.as_str())
}

/// Makes the folders of the cache.
pub async fn prepare(app: &Arc<App>) -> Result<(), Error> {
    app.blocking(|app| {
        for kind in ["steps", "mounts"] {
            let path = folder(app, kind);
            std::fs::create_dir_all(&path).map_err(Error::io("make", &path))?;
        }
        Ok(())
    })
    .await
}

/// Whether the result of a step is there. Notes that it was used.
pub async fn has(app: &Arc<App>, owner: &str, tag: &Tag) -> Result<bool, Error> {
    let owned = app
        .owners
        .get(tag)
        .is_some_and(|found| found.owner == owner);
    if !owned || !app.store.contains(tag) || app.writing.is_writing(tag) {
        return Ok(false);
    }
    used(app, tag).await?;
    Ok(true)
}

/// Notes that the result of a step was used.
pub async fn used(app: &Arc<App>, tag: &Tag) -> Result<(), Error> {
    let tag = tag.clone();
    app.blocking(move |app| {
        let path = folder(app, "steps").join(tag.as_str());
        std::fs::write(&path, b"").map_err(Error::io("write", &path))
    })
    .await
}

/// Removes the result of a step.
pub async fn forget(app: &Arc<App>, tag: &Tag) -> Result<(), Error> {
    if app.store.contains(tag) {
        // Forced: snapshots that build on it share its content and stay.
        snapshots::delete(app, tag.clone(), Deletion::Force).await?;
    }
    let _ = std::fs::remove_file(folder(app, "steps").join(tag.as_str()));
    Ok(())
}

#[derive(Debug)]
struct Entry {
    used: SystemTime,
    bytes: u64,
    what: What,
}

#[derive(Debug)]
enum What {
    Step(Tag),
    Mount(PathBuf),
}

fn entries(app: &App) -> Vec<Entry> {
    let files = |kind: &str| {
        let all = std::fs::read_dir(folder(app, kind)).into_iter().flatten();
        all.flatten().filter_map(|entry| {
            let meta = entry.metadata().ok()?;
            Some((entry, meta))
        })
    };
    let steps = files("steps").filter_map(|(entry, meta)| {
        let tag: Tag = entry.file_name().to_str()?.parse().ok()?;
        let bytes = app.store.detail(&tag).map_or(0, |detail| detail.unique);
        Some(Entry {
            used: meta.modified().ok()?,
            bytes,
            what: What::Step(tag),
        })
    });
    let mounts = files("mounts").filter_map(|(entry, meta)| {
        Some(Entry {
            used: meta.modified().ok()?,
            bytes: meta.len(),
            what: What::Mount(entry.path()),
        })
    });
    steps.chain(mounts).collect()
}

/// Removes the entries that were used least recently, until the rest fits.
pub async fn prune(app: &Arc<App>) -> Result<(), Error> {
    prepare(app).await?;
    shrink(app, MAX_BYTES, |_| true).await.map(drop)
}

/// Removes every step of the owners that the asker stands for. Returns the bytes that came free.
pub async fn remove_all(
    app: &Arc<App>,
    owns: impl Fn(Option<&str>) -> bool + Send + Sync,
) -> Result<u64, Error> {
    prepare(app).await?;
    let mine = |entry: &Entry| match &entry.what {
        What::Step(tag) => owns(app.owners.get(tag).map(|found| found.owner).as_deref()),
        // The owner of a mount is not known any more.
        What::Mount(_) => owns(None),
    };
    shrink(app, 0, mine).await
}

async fn shrink(
    app: &Arc<App>,
    limit: u64,
    may_go: impl Fn(&Entry) -> bool + Send,
) -> Result<u64, Error> {
    let mut all = app.blocking(|app| Ok(entries(app))).await?;
    all.sort_by_key(|entry| entry.used);
    let mut total: u64 = all.iter().map(|entry| entry.bytes).sum();
    let mut freed = 0;
    for entry in all {
        let is_gone = match &entry.what {
            What::Step(tag) => !app.store.contains(tag) && !app.writing.is_writing(tag),
            What::Mount(_) => false,
        };
        if (total <= limit && limit > 0 && !is_gone) || !may_go(&entry) {
            continue;
        }
        match &entry.what {
            What::Step(tag) if app.writing.is_writing(tag) => continue,
            What::Step(tag) => forget(app, tag).await?,
            What::Mount(path) => {
                let _ = std::fs::remove_file(path);
            }
        }
        total = total.saturating_sub(entry.bytes);
        freed += entry.bytes;
    }
    Ok(freed)
}
