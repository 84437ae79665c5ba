//! `RUN --mount`: files that are there while a command runs.
//!
//! Everything lies below [`WORK`] on the disk of the guest, or in memory for secrets, and is mounted where the command expects
//! it. [`Mounted::finish`] takes all of it away before the cut, whether the command succeeded or not.

use std::path::PathBuf;
use std::sync::Arc;

use forkd_api::ErrorCode;
use forkd_dockerfile::{Copy, CopySource, Mount, MountKind};
use forkd_guest_proto::{
    MountRequest, MountSource, PackItem, PackRequest, UnmountRequest, UnpackRequest, WriteRequest,
};
use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;
use tokio::io::AsyncWriteExt;

use crate::cache;
use crate::config::Config;
use crate::context::Context;
use crate::copy::{self, Destination};
use crate::error::BuildError;
use crate::events::Events;
use crate::machine::Machine;

/// The folder of a build in the guest.
pub const WORK: &str = "/.forkd-build";
/// Where secrets lie, in memory.
const SECRETS: &str = "/.forkd-build/secrets";
/// The largest cache mount that is kept.
const MAX_CACHE: u64 = 4 << 30;

/// A mount with what it shows, as far as that is known before the guest is asked.
pub enum Prepared {
    /// Files of the context.
    Context {
        sources: Vec<copy::Source>,
        is_folder: bool,
    },
    /// Files of another stage or image.
    Stage {
        machine: Machine,
        source: String,
    },
    Cache {
        file: PathBuf,
    },
    Tmpfs {
        size_mib: Option<u64>,
    },
    Secret {
        value: Option<Vec<u8>>,
    },
}

/// The files of the context that a bind mount shows.
pub fn bind_sources(
    context: &Context,
    source: &str,
    line: u32,
) -> Result<(Vec<copy::Source>, bool), BuildError> {
    let copy = Copy {
        from: None,
        chown: None,
        chmod: None,
        exclude: Vec::new(),
        unpack: false,
        sources: vec![CopySource::Path(source.to_owned())],
        to: String::new(),
    };
    let sources = copy::select(context, &copy, line)?;
    let is_folder = !matches!(sources.as_slice(), [copy::Source::File { .. }]);
    Ok((sources, is_folder))
}

/// The mounts of one command.
#[derive(Default)]
pub struct Mounted {
    /// Targets with the path that was made for each, in the order in which they were mounted.
    targets: Vec<(String, Option<String>)>,
    /// Caches to keep: the folder in the guest, and the file on the host.
    caches: Vec<(String, PathBuf)>,
    pub env: Vec<(String, String)>,
    has_secrets: bool,
}

impl Mounted {
    /// Puts one mount in place.
    pub async fn add(
        &mut self,
        machine: &Machine,
        context: &Context,
        config: &Config,
        mount: &Mount,
        prepared: Prepared,
        line: u32,
    ) -> Result<(), BuildError> {
        let number = self.targets.len();
        let place = format!("{WORK}/mount-{number}");
        let target = mount.target.as_deref().map(|path| config.absolute(path));
        let read_only = match &mount.kind {
            MountKind::Bind { read_only, .. } | MountKind::Cache { read_only, .. } => *read_only,
            MountKind::Tmpfs { .. } => false,
            MountKind::Secret { .. } => true,
        };
        let what = match prepared {
            Prepared::Tmpfs { size_mib } => MountSource::Tmpfs { size_mib },
            Prepared::Secret { value } => {
                return self.secret(machine, mount, target, value, line).await;
            }
            Prepared::Context { sources, is_folder } => {
                let to = Destination::new(place.clone(), is_folder);
                copy::send(machine, context, sources, &to).await?;
                MountSource::Bind(place)
            }
            Prepared::Stage {
                machine: from,
                source,
            } => {
                let info = from.stat(&source).await?;
                let is_folder =
                    info.is_some_and(|info| info.kind == forkd_guest_proto::FileKind::Directory);
                let to = Destination::new(place.clone(), is_folder);
                copy::between(&from, &[source], machine, &to, line).await?;
                MountSource::Bind(place)
            }
            Prepared::Cache { file } => {
                machine.make_folder(&place).await?;
                self.fill_cache(machine, mount, &place, &file).await?;
                if !read_only {
                    self.caches.push((place.clone(), file));
                }
                MountSource::Bind(place)
            }
        };
        let target = target.ok_or_else(|| {
            BuildError::at(line, ErrorCode::DockerfileInvalid, "a mount needs a target")
        })?;
        self.mount(machine, what, target, read_only).await?;
        Ok(())
    }

    async fn mount(
        &mut self,
        machine: &Machine,
        what: MountSource,
        target: String,
        read_only: bool,
    ) -> Result<(), Error> {
        let request = MountRequest {
            what,
            target: target.clone(),
            read_only,
        };
        let done = machine.calls().await?.mount(request).await;
        let done = done.map_err(Error::agent(format!("{target} cannot be mounted on")))?;
        self.targets.push((target, done.made));
        Ok(())
    }

    async fn secret(
        &mut self,
        machine: &Machine,
        mount: &Mount,
        target: Option<String>,
        value: Option<Vec<u8>>,
        line: u32,
    ) -> Result<(), BuildError> {
        let MountKind::Secret { id, required, env } = &mount.kind else {
            return Ok(());
        };
        let Some(value) = value else {
            if *required {
                let message = format!("secret {id:.80} is required: pass it with --secret");
                return Err(BuildError::at(line, ErrorCode::InvalidRequest, message));
            }
            return Ok(());
        };
        if let Some(name) = env {
            let text = String::from_utf8(value.clone()).map_err(|_| {
                let message = format!("secret {id:.80} is not UTF-8, so it cannot be a variable");
                BuildError::at(line, ErrorCode::InvalidRequest, message)
            })?;
            self.env.push((name.clone(), text));
            if target.is_none() {
                return Ok(());
            }
        }
        if !self.has_secrets {
            let what = MountSource::Tmpfs { size_mib: Some(64) };
            self.mount(machine, what, SECRETS.to_owned(), false).await?;
            self.has_secrets = true;
        }
        let path = format!("{SECRETS}/{}", self.targets.len());
        let owner = format!("{}:{}", mount.uid.unwrap_or(0), mount.gid.unwrap_or(0));
        let request = WriteRequest {
            path: path.clone(),
            mode: Some(mount.mode.unwrap_or(0o400)),
            owner: Some(owner),
            ..WriteRequest::default()
        };
        let calls = machine.calls().await?;
        calls
            .write_file(request, &value)
            .await
            .map_err(Error::agent("a secret could not be passed on"))?;
        let target = target.unwrap_or_else(|| format!("/run/secrets/{id}"));
        self.mount(machine, MountSource::Bind(path), target, true)
            .await?;
        Ok(())
    }

    /// Brings the content of a cache into the guest.
    async fn fill_cache(
        &self,
        machine: &Machine,
        mount: &Mount,
        place: &str,
        file: &PathBuf,
    ) -> Result<(), Error> {
        match std::fs::File::open(file) {
            Ok(mut content) => {
                let request = UnpackRequest {
                    path: place.to_owned(),
                    ..UnpackRequest::default()
                };
                let copied = copy::stream(machine, request, move |out| {
                    std::io::copy(&mut content, out).map(drop)
                });
                copied.await?;
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io("open", file)(error)),
        }
        let owner = format!("{}:{}", mount.uid.unwrap_or(0), mount.gid.unwrap_or(0));
        let request = forkd_guest_proto::SetAttrRequest {
            path: place.to_owned(),
            mode: Some(mount.mode.unwrap_or(0o755)),
            owner: Some(owner),
            attributes: None,
        };
        let set = machine.calls().await?.set_attr(request).await;
        set.map_err(Error::agent("a cache mount could not be prepared"))
    }

    /// Takes everything away. Caches are kept if the command succeeded.
    pub async fn finish(
        self,
        app: &Arc<App>,
        machine: &Machine,
        keep_caches: bool,
        events: &Events,
    ) -> Result<(), Error> {
        if keep_caches {
            for (place, file) in &self.caches {
                if !save(app, machine, place, file).await? {
                    let limit = MAX_CACHE >> 30;
                    let text = format!("a cache mount is larger than {limit} GiB: it is not kept");
                    events.note(text).await?;
                }
            }
        }
        for (target, made) in self.targets.into_iter().rev() {
            let request = UnmountRequest {
                target: target.clone(),
                remove: made,
            };
            let done = machine.calls().await?.unmount(request).await;
            done.map_err(Error::agent(format!("{target} cannot be unmounted")))?;
        }
        machine.remove(WORK).await
    }
}

/// Keeps the content of a cache. False if it is too large.
async fn save(
    app: &Arc<App>,
    machine: &Machine,
    place: &str,
    file: &PathBuf,
) -> Result<bool, Error> {
    cache::prepare(app).await?;
    let new = file.with_extension(hex::encode(rand::random::<[u8; 8]>()));
    let guard = RemoveOnDrop(new.clone());
    let failed = || Error::io("write", new.clone());
    let lost = || Error::agent("a cache mount could not be kept");
    let mut out = tokio::fs::File::create_new(&new).await.map_err(failed())?;
    let request = PackRequest {
        items: vec![PackItem {
            from: place.to_owned(),
            to: String::new(),
        }],
        ..PackRequest::default()
    };
    let mut packing = machine.calls().await?.pack(request).map_err(lost())?;
    let mut size = 0;
    while let Some(piece) = packing.next().await.map_err(lost())? {
        size += piece.len() as u64;
        if size > MAX_CACHE {
            return Ok(false);
        }
        out.write_all(&piece).await.map_err(failed())?;
    }
    out.flush().await.map_err(failed())?;
    std::fs::rename(&new, file).map_err(failed())?;
    drop(guard);
    Ok(true)
}

/// Removes a file that did not get its name.
struct RemoveOnDrop(PathBuf);

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
