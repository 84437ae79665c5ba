//! Making the first snapshot of a line: boot, warm up, freeze.

mod assets;
mod parent;
mod prepare;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use forkd_api::{ErrorCode, EventKind, SnapshotInfo};
use forkd_types::{Engine, Tag};
use tokio_util::sync::CancellationToken;

use crate::app::App;
use crate::error::Error;
use crate::launch;
use crate::limits::BuildSlot;
use crate::ops::writing::Claimed;
use crate::trace::TARGET;
use crate::volumes::VolumeWish;

/// Guest memory that a parent may have, in MiB.
pub const MEMORY_MIB: std::ops::RangeInclusive<u32> =
    forkd_vmm_proto::MIN_MEMORY_MIB..=forkd_vmm_proto::MAX_MEMORY_MIB;
/// vCPUs that a parent may have.
pub const VCPUS: std::ops::RangeInclusive<u8> = 1..=forkd_vmm_proto::MAX_VCPUS;

/// How long `forkd-image` may take to make the missing parts of a parent. A kernel is compiled in this time, so it is much
/// longer than a boot; deleting the tag ends it.
const MAKE_ASSETS: Duration = Duration::from_secs(2 * 3600);

/// Where the root disk comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Disk {
    /// An image by name.
    Image(Tag),
    /// A file on the host.
    File(PathBuf),
    /// Content of the store, with a name for people.
    Stored { path: PathBuf, name: String },
}

/// A checked request for a parent.
#[derive(Debug, Clone)]
pub struct BuildRequest {
    pub disk: Disk,
    /// The engine to build it on, in place of forkd's own.
    pub engine: Option<Engine>,
    /// A kernel on the host, in place of the usual one.
    pub kernel: Option<PathBuf>,
    /// An initial RAM disk on the host, in place of the usual one.
    pub initramfs: Option<PathBuf>,
    /// Guest memory, in place of the image's own wish.
    pub memory_mib: Option<u32>,
    /// vCPUs, in place of the image's own wish.
    pub vcpus: Option<u8>,
    /// A command to run before the cut.
    pub warmup: Vec<String>,
    /// Python to run before the cut.
    pub warmup_code: Option<String>,
    /// The longest that boot and warm-up may take. Making an image has a limit of its own.
    pub timeout: Duration,
    /// Labels of the snapshot.
    pub labels: BTreeMap<String, String>,
    pub owner: String,
    /// Volumes of which the snapshot holds clones.
    pub volumes: Vec<VolumeWish>,
}

/// Builds a parent and stores it under the claimed tag.
#[tracing::instrument(target = TARGET, skip_all, fields(forkd.snapshot = %claim.tag()))]
pub async fn build(
    app: &Arc<App>,
    request: BuildRequest,
    claim: Claimed,
) -> Result<SnapshotInfo, Error> {
    let tag = claim.tag().clone();
    let cancel = claim.allow_cancel();
    let (result, claim) = match prepare(app, &request, &tag, &cancel).await {
        Ok((assets, slot)) => {
            let made = parent::make(app, &request, claim, &cancel, assets).await;
            drop(slot);
            made
        }
        Err(error) => (Err(error), Some(claim)),
    };
    match &result {
        Ok(_) => {
            // First: a listener may use the tag at once.
            drop(claim);
            app.events.tell(EventKind::SnapshotReady, &tag, None);
        }
        Err(error) => {
            tracing::warn!(%tag, error = error.chain(), "the parent could not be built");
            app.events
                .tell(EventKind::SnapshotFailed, &tag, Some(error.chain()));
            if let Some(claim) = claim {
                claim.failed(error.chain());
            }
        }
    }
    result
}

/// Asks for room before the first resource is taken, and finds or makes the files that the parent boots from.
async fn prepare(
    app: &Arc<App>,
    request: &BuildRequest,
    tag: &Tag,
    cancel: &CancellationToken,
) -> Result<(assets::Assets, BuildSlot), Error> {
    app.check_open()?;
    if request.engine.is_some() {
        // First: an image may take minutes to make.
        launch::engine::for_parent(&app.launcher, request.engine).await?;
    }
    let mut slot = app.limits.build(&request.owner, &app.store)?;
    let assets = tokio::select! {
        biased;
        () = cancel.cancelled() => return Err(cancelled(tag)),
        found = tokio::time::timeout(MAKE_ASSETS, assets::find(app, request)) => {
            found.map_err(|_| Error::Timeout {
                what: format!("forkd-image, for the parent {tag},"),
                seconds: MAKE_ASSETS.as_secs(),
            })??
        }
    };
    app.limits.promise_parent(&mut slot, assets.memory_mib)?;
    Ok((assets, slot))
}

fn cancelled(tag: &Tag) -> Error {
    Error::refused(
        ErrorCode::WrongState,
        format!("the build was cancelled: snapshot {tag} was deleted"),
    )
}
