//! Room above the memory limit of a sandbox while it is cut.
//!
//! While a cut is written, every page that the guest changes exists twice, and the written pages may count in the cgroup
//! of the source, too. [`raise`] lifts the limit by as much as the cut can take, and [`Headroom::lower`] restores it, so
//! that a cut never ends a source that is near its limit. A daemon that dies in between leaves the higher limit; the next
//! daemon sets every limit again when it adopts the sandbox.

use crate::app::App;
use crate::error::{Error, chain};
use crate::limits::PromisedMemory;
use crate::process;
use crate::state::SandboxRecord;

/// MiB for the process that writes the pages.
const WRITER_MIB: u64 = 8;

/// Raised limits. The host memory behind them is promised until they are lowered.
#[derive(Debug)]
pub(super) struct Headroom {
    _promised: PromisedMemory,
}

/// MiB of memory that only the VMM of this sandbox has; at most the memory of the guest.
pub(super) fn private_mib(record: &SandboxRecord) -> u64 {
    let whole = u64::from(record.memory_mib);
    record
        .pid
        .and_then(process::anonymous_bytes)
        .map_or(whole, |bytes| bytes.div_ceil(1 << 20))
        .min(whole)
}

/// Raises the memory limit of a sandbox for a cut that writes so many MiB. A sandbox without a limit needs no room. Fails
/// if the host has too little memory, before the source is stopped.
pub(super) async fn raise(
    app: &App,
    record: &SandboxRecord,
    copied_mib: u64,
) -> Result<Option<Headroom>, Error> {
    let Some(limit) = record.memory_limit_mib else {
        return Ok(None);
    };
    let room = private_mib(record) + copied_mib + WRITER_MIB;
    let promised = app.limits.live_cut(room)?;
    set(app, record, Some(limit.saturating_add(room))).await?;
    Ok(Some(Headroom {
        _promised: promised,
    }))
}

impl Headroom {
    /// Restores the limit. A failure is logged: the sandbox goes on with more room than it was given.
    pub(super) async fn lower(self, app: &App, record: &SandboxRecord) {
        restore(app, record).await;
    }
}

/// Sets the limits of a record.
pub(super) async fn restore(app: &App, record: &SandboxRecord) {
    if let Err(error) = set(app, record, record.memory_limit_mib).await {
        tracing::warn!(sandbox = %record.id, error = chain(&error), "the memory limit was not set again after a cut");
    }
}

async fn set(app: &App, record: &SandboxRecord, memory_mib: Option<u64>) -> Result<(), Error> {
    let limits = record.limits.for_host(memory_mib, &app.config.data_dir)?;
    Ok(app.launcher.set_limits(&record.id, limits).await?)
}
