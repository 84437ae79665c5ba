//! From the last state of a build to an image.

use std::sync::Arc;

use forkd_api::{ErrorCode, ImageInfo, PullPolicy};
use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::ops::images::{self, BUILT, FetchWish, Installed, Operation};
use forkd_sandboxes::ops::snapshots;
use forkd_store::Deletion;
use forkd_types::{Policy, Tag};
use tokio::sync::mpsc;

use crate::base::{Base, ended};
use crate::events::Events;
use crate::layer::Layer;
use crate::machine::Machine;
use crate::wish::BuildWish;

/// Pieces of the archive on their way to `forkd-image`.
const PIECES: usize = 4;
/// Names below `/v1/images` that are no images.
const ROUTES: [&str; 2] = ["archive", "prune"];

/// Refuses a name that the build could not give to its image.
pub async fn check_name(app: &Arc<App>, wish: &BuildWish) -> Result<(), Error> {
    let name = wish.name.clone();
    if ROUTES.contains(&name.as_str()) {
        return Err(Error::refused(
            ErrorCode::InvalidName,
            format!("{name} is the name of a route"),
        ));
    }
    let owner = wish.owner.clone();
    app.blocking(move |app| {
        if app.store.image(&name).is_err() {
            return Ok(());
        }
        let found = Installed::get(&app.store, &name, &|_| true)?;
        let ours = found.origin.is_some_and(|origin| {
            origin.owners == [owner] && origin.asked.iter().any(|one| one.starts_with(BUILT))
        });
        match ours {
            true => Ok(()),
            false => Err(Error::hinted(
                ErrorCode::AlreadyExists,
                format!("there is already an image {name} that you did not build"),
                "choose another name with -t",
            )),
        }
    })
    .await
}

/// Cancels the operation that installs the image of a build that was dropped.
struct CancelOnDrop(Arc<Operation>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        // Without effect on an operation that has ended.
        self.0.cancelled.cancel();
    }
}

/// Installs the state as an image, unless it is installed already.
pub async fn install(
    app: &Arc<App>,
    wish: &BuildWish,
    done: &Base,
    events: &Events,
) -> Result<ImageInfo, Error> {
    let key = done
        .key
        .then(&serde_json::json!([done.config.to_key(), wish.disk_mib]))
        .hex();
    if let Some(image) = installed(app, &wish.name, &key).await?
        && !wish.no_cache
    {
        return Ok(image);
    }
    events.note("packing the image").await?;
    let machine = Machine::start(app, &done.tag, &wish.owner, Policy::none(), "result").await?;
    let layer = Layer::pack(app, &machine).await?;
    machine.end().await;
    events.note("installing the image").await?;
    let fetch = FetchWish {
        from: "-".to_owned(),
        name: Some(wish.name.to_string()),
        platform: None,
        disk_mib: wish.disk_mib,
        pull: PullPolicy::Always,
        credential: None,
        owner: wish.owner.clone(),
        built: Some(key),
    };
    let (sender, receiver) = mpsc::channel(PIECES);
    let operation = CancelOnDrop(images::receive(app, fetch, receiver)?);
    let sent = layer.send(&done.config, &wish.name, &sender).await;
    drop(sender);
    // The reason of the operation comes first: a program that has failed takes no more.
    let name = ended(&operation.0).await?;
    sent?;
    remove_stale(app, wish).await?;
    let found = app
        .blocking(move |app| Installed::get(&app.store, &name, &|_| true))
        .await?;
    Ok(found.info())
}

/// The image of that name, if the same build made it.
async fn installed(app: &Arc<App>, name: &Tag, key: &str) -> Result<Option<ImageInfo>, Error> {
    let (name, asked) = (name.clone(), format!("{BUILT}{key}"));
    app.blocking(move |app| {
        if app.store.image(&name).is_err() {
            return Ok(None);
        }
        let found = Installed::get(&app.store, &name, &|_| true)?;
        let same = found
            .origin
            .as_ref()
            .is_some_and(|origin| origin.asked.contains(&asked));
        Ok(same.then(|| found.info()))
    })
    .await
}

/// `forkd run` keeps parents of images under tags of its own. Those of the replaced image are not used again.
async fn remove_stale(app: &Arc<App>, wish: &BuildWish) -> Result<(), Error> {
    let end = format!("-{}", wish.name);
    let tags: Vec<Tag> = app
        .store
        .list()
        .iter()
        .map(|entry| entry.tag().clone())
        .filter(|tag| {
            let shape = tag.as_str().strip_suffix(&end);
            shape.is_some_and(|shape| shape == "run" || shape.starts_with("run."))
        })
        .filter(|tag| {
            let owner = app.owners.get(tag).map(|found| found.owner);
            owner.as_deref() == Some(wish.owner.as_str())
        })
        .collect();
    for tag in tags {
        snapshots::delete(app, tag, Deletion::Force).await?;
    }
    Ok(())
}
