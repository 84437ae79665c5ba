//! Images: fetched from registries or archives, listed, described and removed.

mod fetch;
mod installed;
mod operations;

use std::sync::Arc;

use forkd_api::{ErrorCode, ImageDetail, ImageInfo, PrunedImages};
use forkd_types::Tag;

pub use fetch::{FetchWish, Pieces, fetch, receive};
pub use installed::{BUILT, Installed, Owns, sweep};
pub use operations::{Operation, Operations};

use crate::app::App;
use crate::error::Error;

/// Every image that the asker may see.
pub async fn list(
    app: &Arc<App>,
    owns: impl Fn(Option<&str>) -> bool + Send + 'static,
) -> Result<Vec<ImageInfo>, Error> {
    app.blocking(move |app| {
        let all = Installed::list(&app.store, &owns)?;
        Ok(all.iter().map(Installed::info).collect())
    })
    .await
}

/// Everything about an image. The snapshots are those of every owner.
pub async fn detail(
    app: &Arc<App>,
    name: Tag,
    owns: impl Fn(Option<&str>) -> bool + Send + 'static,
) -> Result<ImageDetail, Error> {
    app.blocking(move |app| Ok(Installed::get(&app.store, &name, &owns)?.detail(&app.store)))
        .await
}

/// Refuses an image that does not exist for the asker. A name without an image passes: it may be that of a recipe.
pub async fn check_visible(
    app: &Arc<App>,
    name: Tag,
    owns: impl Fn(Option<&str>) -> bool + Send + 'static,
) -> Result<(), Error> {
    app.blocking(move |app| {
        if app.store.image(&name).is_err() {
            return Ok(());
        }
        Installed::get(&app.store, &name, &owns).map(drop)
    })
    .await
}

/// Removes an image. Snapshots that were booted from it stay.
pub async fn remove(
    app: &Arc<App>,
    name: Tag,
    owns: impl Fn(Option<&str>) -> bool + Send + 'static,
) -> Result<(), Error> {
    app.blocking(move |app| {
        let found = Installed::get(&app.store, &name, &owns)?;
        if !found.is_owned(&owns) {
            return Err(Error::refused(
                ErrorCode::Forbidden,
                format!("image {name} is there for all, and not yours to remove"),
            ));
        }
        found.remove()
    })
    .await
}

/// Removes the fetched images of the asker that no snapshot was booted from. An administrator's call also empties the
/// store of fetched layers.
pub async fn prune(
    app: &Arc<App>,
    owns: impl Fn(Option<&str>) -> bool + Send + 'static,
) -> Result<PrunedImages, Error> {
    app.blocking(move |app| {
        let mut pruned = PrunedImages::default();
        for one in Installed::list(&app.store, &owns)? {
            let fetched = one.origin.is_some() && one.is_owned(&owns);
            if fetched && one.snapshots(&app.store).is_empty() {
                pruned.bytes += one.image.sizes.physical;
                pruned.images.push(one.image.name.to_string());
                one.remove()?;
            }
        }
        if owns(None) {
            pruned.bytes += empty(&app.store.layout().downloaded())?;
        }
        Ok(pruned)
    })
    .await
}

/// Removes the files in a folder. A fetch that reads one has it open; one that writes a part makes it anew.
fn empty(folder: &std::path::Path) -> Result<u64, Error> {
    let mut freed = 0;
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(Error::io("read", folder)(error)),
    };
    for entry in entries {
        let path = entry.map_err(Error::io("read", folder))?.path();
        // A part is being written, or is a day old at most.
        if path.extension().is_some() {
            continue;
        }
        freed += std::fs::metadata(&path).map_or(0, |meta| meta.len());
        std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
    }
    Ok(freed)
}
