//! The state that a stage begins with: an image of this host or of a registry, or nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use forkd_api::{ErrorCode, OperationStatus, PullPolicy};
use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::ops::branch::claim;
use forkd_sandboxes::ops::build::{self, BuildRequest, Disk};
use forkd_sandboxes::ops::images::{self, FetchWish, Installed, Operation};
use forkd_sandboxes::trace;
use forkd_types::Tag;
use serde_json::json;
use tokio::sync::mpsc;

use crate::cache;
use crate::config::Config;
use crate::events::Events;
use crate::key::Key;
use crate::layer::oci_archive;
use crate::wish::Owns;

/// How long a parent may take to boot.
const BOOT: Duration = Duration::from_secs(600);
/// The pause before a tag that another build writes is looked at again.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// How long one wait for an operation takes.
const WAIT: Duration = Duration::from_secs(60);

/// A state to begin with.
#[derive(Debug, Clone)]
pub struct Base {
    pub key: Key,
    /// The snapshot with the state.
    pub tag: Tag,
    pub config: Config,
}

/// Who builds, and in which machine.
pub struct Bases<'a> {
    pub app: &'a Arc<App>,
    pub owner: &'a str,
    pub owns: &'a Owns,
    pub memory_mib: Option<u32>,
    pub vcpus: Option<u8>,
    pub disk_mib: u32,
}

impl Bases<'_> {
    /// The image of a reference: an installed one, or one that is fetched.
    pub async fn image(&self, reference: &str, events: &Events) -> Result<Base, Error> {
        if let Ok(name) = reference.parse::<Tag>()
            && let Some(found) = self.installed(&name).await?
        {
            return self.boot(&found, Some(events)).await;
        }
        let full = match reference.contains([':', '@', '/']) {
            true => reference.to_owned(),
            // The tag that a name without one has everywhere.
            false => format!("{reference}:latest"),
        };
        if full.len() > 1024 || full.starts_with('-') || !full.bytes().all(|b| b.is_ascii_graphic())
        {
            return Err(Error::refused(
                ErrorCode::ImageInvalid,
                format!("{reference:.80} is not the name of an image"),
            ));
        }
        events.note(format!("fetching {full}")).await?;
        let wish = self.fetch_wish(&full, None);
        let owns = Arc::clone(self.owns);
        let operation = images::fetch(self.app, wish, move |owner| owns(owner)).await?;
        let name = ended(&*self.app.operations.get(&operation.id)?).await?;
        let found = self.installed(&name).await?;
        let found = found.ok_or_else(|| no_image(&name))?;
        self.boot(&found, Some(events)).await
    }

    /// An installed image, by its name.
    pub async fn named(&self, name: &Tag) -> Result<(Base, Config), Error> {
        let found = self.installed(name).await?;
        let found = found.ok_or_else(|| no_image(name))?;
        let base = self.boot(&found, None).await?;
        let config = base.config.clone();
        Ok((base, config))
    }

    /// An image without files.
    pub async fn scratch(&self, events: &Events) -> Result<Base, Error> {
        let name: Tag = format!("forkd-scratch-{}", self.disk_mib)
            .parse()
            .map_err(|_| Error::Task)?;
        if let Some(found) = self.installed(&name).await? {
            return self.boot(&found, Some(events)).await;
        }
        let (sender, receiver) = mpsc::channel(1);
        let wish = self.fetch_wish("-", Some(name.to_string()));
        let operation = images::receive(self.app, wish, receiver)?;
        // An archive without an entry is two blocks of zeros.
        let bytes = oci_archive(&[0; 1024], &Config::default(), &name)?;
        // A receiver that is gone has failed: the operation has the reason.
        let _ = sender.send(bytes).await;
        drop(sender);
        ended(&operation).await?;
        let found = self.installed(&name).await?;
        let mut base = self
            .boot(&found.ok_or_else(|| no_image(&name))?, Some(events))
            .await?;
        base.config = Config::default();
        Ok(base)
    }

    fn fetch_wish(&self, from: &str, name: Option<String>) -> FetchWish {
        FetchWish {
            from: from.to_owned(),
            name,
            platform: None,
            disk_mib: self.disk_mib,
            pull: PullPolicy::IfMissing,
            credential: None,
            owner: self.owner.to_owned(),
            built: None,
        }
    }

    async fn installed(&self, name: &Tag) -> Result<Option<Installed>, Error> {
        let (name, owns) = (name.clone(), Arc::clone(self.owns));
        self.app
            .blocking(
                move |app| match Installed::get(&app.store, &name, &|owner| owns(owner)) {
                    Ok(found) => Ok(Some(found)),
                    Err(error) if error.code() == ErrorCode::ImageNotFound => Ok(None),
                    Err(error) => Err(error),
                },
            )
            .await
    }

    /// The snapshot of a parent of the image. It is made if it is missing.
    async fn boot(&self, image: &Installed, events: Option<&Events>) -> Result<Base, Error> {
        let name = &image.image.name;
        let record = image.record.as_ref().ok_or_else(|| {
            Error::refused(
                ErrorCode::ImageInvalid,
                format!("image {name} has no readable record"),
            )
        })?;
        let key = Key::first(&json!({
            "image": record.disk.digest.to_string(),
            "owner": self.owner,
            "memory": self.memory_mib,
            "vcpus": self.vcpus,
            "forkd": env!("CARGO_PKG_VERSION"),
        }));
        let base = Base {
            key,
            tag: key.tag(),
            config: Config::of_image(record),
        };
        while !cache::has(self.app, self.owner, &base.tag).await? {
            if self.app.writing.is_writing(&base.tag) {
                // Another build boots the same parent.
                tokio::time::sleep(LOOK_AGAIN).await;
                continue;
            }
            if let Some(events) = events {
                events.note(format!("booting {name}")).await?;
            }
            self.make(name, &base.tag).await?;
        }
        Ok(base)
    }

    async fn make(&self, image: &Tag, tag: &Tag) -> Result<(), Error> {
        let request = BuildRequest {
            volumes: Vec::new(),
            disk: Disk::Image(image.clone()),
            engine: None,
            kernel: None,
            initramfs: None,
            memory_mib: self.memory_mib,
            vcpus: self.vcpus,
            warmup: Vec::new(),
            warmup_code: None,
            timeout: BOOT,
            labels: BTreeMap::from([("forkd.build".to_owned(), image.to_string())]),
            owner: self.owner.to_owned(),
        };
        let claimed = match claim(self.app, tag, self.owner, None).await {
            Err(error) if error.code() == ErrorCode::AlreadyExists => return Ok(()),
            claimed => claimed?,
        };
        let cancel = CancelOnDrop {
            app: self.app,
            tag: Some(tag),
        };
        let app = Arc::clone(self.app);
        // A task of its own: a build that is dropped does not leave a parent half built.
        let work = trace::spawn(async move { build::build(&app, request, claimed).await });
        let made = work.await.map_err(|_| Error::Task)?;
        cancel.disarm();
        made?;
        cache::used(self.app, tag).await
    }
}

/// Ends the boot of a parent whose build was dropped.
struct CancelOnDrop<'a> {
    app: &'a Arc<App>,
    tag: Option<&'a Tag>,
}

impl CancelOnDrop<'_> {
    fn disarm(mut self) {
        self.tag = None;
    }
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(tag) = self.tag {
            self.app.writing.cancel(tag);
        }
    }
}

fn no_image(name: &Tag) -> Error {
    Error::refused(
        ErrorCode::ImageNotFound,
        format!("there is no image {name}"),
    )
}

/// Waits for the end of an operation. Returns the name of its image.
pub async fn ended(operation: &Operation) -> Result<Tag, Error> {
    loop {
        let info = operation.wait(WAIT).await;
        match (info.status, info.image, info.error) {
            (OperationStatus::Running, ..) => {}
            (_, Some(image), _) => return image.name.parse().map_err(|_| Error::Task),
            (_, None, Some(error)) => {
                return Err(Error::Refused {
                    code: error.code,
                    message: error.error,
                    hint: error.hint,
                });
            }
            (_, None, None) => return Err(Error::Task),
        }
    }
}
