//! Making the first snapshot of a line: boot, warm up, freeze.

mod assets;
mod parent;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use forkd_api::{EventKind, SnapshotInfo};
use forkd_types::Tag;

use crate::app::App;
use crate::error::Error;
use crate::ops::writing::Claimed;
use crate::trace::TARGET;

/// What the root disk is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Disk {
    /// An image by name.
    Image(Tag),
    /// A file on the host.
    File(PathBuf),
}

/// A checked wish for a parent.
#[derive(Debug, Clone)]
pub struct BuildRequest {
    /// What the root disk is.
    pub disk: Disk,
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
    /// The longest that boot and warm-up may take.
    pub timeout: Duration,
    /// Labels of the snapshot.
    pub labels: BTreeMap<String, String>,
}

/// Builds a parent and stores it under the claimed tag.
#[tracing::instrument(target = TARGET, skip_all, fields(forkd.snapshot = %claimed.tag()))]
pub async fn build(
    app: &Arc<App>,
    request: BuildRequest,
    claimed: Claimed,
) -> Result<SnapshotInfo, Error> {
    let tag = claimed.tag().clone();
    let result = async {
        app.check_open()?;
        let assets = assets::find(app, &request).await?;
        parent::make(app, &request, &tag, assets).await
    }
    .await;
    match &result {
        Ok(_) => {
            // First: whoever hears of the tag may use it at once.
            drop(claimed);
            app.events.tell(EventKind::SnapshotReady, &tag, None);
        }
        Err(error) => {
            tracing::warn!(%tag, error = error.chain(), "the parent could not be built");
            app.events
                .tell(EventKind::SnapshotFailed, &tag, Some(error.chain()));
            claimed.failed(error.chain());
        }
    }
    result
}
