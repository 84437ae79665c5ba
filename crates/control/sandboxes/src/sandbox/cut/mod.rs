//! The one way to capture a VM: branch, live fork, suspend and the build of a parent are the same cut with another
//! [`Destination`].
//!
//! ```text
//!   files opened ─► new layers announced ─► VMM cuts ─► content ─► record names it ─► destination
//!        │                  │                  │           │
//!        └── refused: nothing was touched      │           └── failed: the next cut writes all of memory
//!                           └──────────────────┴── refused before the instant: layers withdrawn
//! ```
//!
//! Whatever fails, the source goes on: it does so by itself unless the destination holds it, and [`serve`] is the one place
//! that resumes a held source.

mod files;
mod live;
mod publish;

use std::sync::Arc;
use std::time::Instant;

use forkd_api::{EventKind, SnapshotInfo};
use forkd_store::{MemoryManifest, Published};
use forkd_types::Tag;
use forkd_vmm_proto::{Capability, Command, CutExtent, CutReport, CutSpec, Event, ImageId, Reply};
use tokio::sync::oneshot;

use super::freeze::FrozenSource;
use super::handle::SandboxHandle;
use super::headroom;
use super::layers;
use super::owner::SandboxOwner;
use super::state::Step;
use crate::app::App;
use crate::error::Error;
use crate::launch::FdList;
use crate::ops::writing::Claimed;
use crate::state::SandboxRecord;
use files::CutFiles;

/// Layers of memory after which a cut writes all of it: every layer is a descriptor and a mapping in each child.
const MAX_MEMORY_LAYERS: usize = 32;

/// Where the VMM writes a cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Into memory, which the children map.
    Memory,
    /// State and index into memory, pages into a file: the memory limit of the source has no room for them.
    MixedMemory,
    /// Into files of the store.
    Disk,
}

/// How much of memory a cut writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutMode {
    /// All of it.
    Full,
    /// The pages that differ from the last cut, or from the snapshot that the sandbox was started from.
    Diff,
}

/// The purpose of a cut.
#[derive(Debug)]
pub enum Destination {
    /// A durable snapshot with a name; the source goes on.
    Tag {
        claim: Claimed,
        /// When the caller gets its answer.
        caller: Caller,
    },
    /// Children that start at once: no name, and nothing is synced. The content lives as long as they do.
    Live,
    /// A durable snapshot of a source that is about to end. The source stands still until `until` resolves, and goes on
    /// then unless it was deleted.
    Suspend {
        claim: Claimed,
        /// Resolves when the other end is dropped.
        until: oneshot::Receiver<()>,
    },
    /// The first snapshot of a line. The VM is not needed any more.
    Parent {
        claim: Claimed,
        /// Facts that only the build knows.
        about: Box<AboutParent>,
    },
}

/// The event that the caller of a branch waits for.
#[derive(Debug)]
pub enum Caller {
    /// The durable snapshot.
    WaitsForEnd,
    /// The moment the source runs again.
    WaitsForCapture(oneshot::Sender<u64>),
    /// Nothing any more: a failure is kept with the tag.
    Told,
}

/// Facts about the snapshot of a parent that only its build knows.
#[derive(Debug, Clone)]
pub struct AboutParent {
    /// From boot to the end of the warm-up.
    pub ready_us: u64,
    /// Labels of the snapshot.
    pub labels: std::collections::BTreeMap<String, String>,
}

impl Destination {
    fn claim(&self) -> Option<&Claimed> {
        match self {
            Self::Tag { claim, .. } | Self::Suspend { claim, .. } | Self::Parent { claim, .. } => {
                Some(claim)
            }
            Self::Live => None,
        }
    }

    /// The name of the snapshot, if it gets one.
    pub fn tag(&self) -> Option<&Tag> {
        self.claim().map(Claimed::tag)
    }

    /// The source runs on from the instant of the cut.
    fn goes_on(&self) -> bool {
        matches!(self, Self::Tag { .. } | Self::Live)
    }
}

/// A request to cut a sandbox.
#[derive(Debug)]
pub struct CutAsk {
    pub destination: Destination,
    /// How much to write.
    pub mode: CutMode,
    /// Freeze the user processes of the guest for the cut.
    pub freeze: bool,
    /// Told when the destination is reached.
    pub done: oneshot::Sender<Result<CutDone, Error>>,
}

impl CutAsk {
    pub(super) fn refuse(self, error: Error) {
        drop(self.done.send(Err(error)));
    }
}

/// A snapshot that a cut made.
#[derive(Debug)]
pub struct CutDone {
    /// The snapshot, with a lease on its blobs.
    pub published: Published,
    /// As the API shows it.
    pub info: SnapshotInfo,
}

/// Carries a cut out.
pub(super) async fn serve(owner: &mut SandboxOwner, ask: CutAsk) {
    let sandbox = Arc::clone(&owner.sandbox);
    if ask.destination.goes_on()
        && let Err(error) = owner.require(Capability::LiveCut)
    {
        return ask.refuse(error);
    }
    if !sandbox.step(Step::BeginCut) {
        return ask.refuse(sandbox.not_running());
    }
    let CutAsk {
        destination,
        mode,
        freeze,
        done,
    } = ask;
    let mut cut = Cut::new(owner, destination, mode);
    cut.freeze = freeze;
    let result = cut.run().await;
    let held = cut.is_held();
    let destination = cut.destination;
    let tag = destination.tag().cloned();
    let mut until = None;
    // The tag is free before the caller gets its answer: the caller may use or delete the tag at once.
    match destination {
        Destination::Tag { claim, caller } => {
            let told = matches!(caller, Caller::Told);
            free(claim, told, result.as_ref().err());
        }
        Destination::Suspend { claim, until: wait } => {
            drop(claim);
            until = result.is_ok().then_some(wait);
        }
        Destination::Parent { .. } | Destination::Live => {}
    }
    announce(&owner.app, &sandbox, tag.as_ref(), result.as_ref().err());
    // The caller may have stopped waiting.
    let _ = done.send(result);
    if held {
        release(owner, until).await;
    }
    sandbox.step(Step::EndCut);
}

/// Lets a held source go on: at once, or when the other end of `until` is dropped. A source that is being deleted stays.
async fn release(owner: &mut SandboxOwner, until: Option<oneshot::Receiver<()>>) {
    let sandbox = Arc::clone(&owner.sandbox);
    if let Some(until) = until {
        tokio::select! {
            biased;
            () = sandbox.stop.cancelled() => return,
            _ = until => {}
        }
    }
    if let Err(error) = owner.call(Command::Resume, &[]).await {
        tracing::error!(sandbox = %sandbox.id, error = error.chain(), "the source does not go on after a cut");
    }
}

/// Frees the tag. A caller who was told that it is being written finds the reason there if the cut failed.
fn free(claim: Claimed, told: bool, error: Option<&Error>) {
    match error {
        Some(error) if told => claim.failed(error.chain()),
        _ => drop(claim),
    }
}

fn announce(app: &App, sandbox: &SandboxHandle, tag: Option<&Tag>, error: Option<&Error>) {
    let Some(error) = error else {
        let detail = tag.map(Tag::to_string);
        app.events
            .tell(EventKind::SandboxBranched, &sandbox.id, detail);
        if let Some(tag) = tag {
            app.events.tell(EventKind::SnapshotReady, tag, None);
        }
        return;
    };
    metrics::counter!("forkd_branch_failures_total").increment(1);
    tracing::warn!(sandbox = %sandbox.id, ?tag, error = error.chain(), "the cut failed");
    if let Some(tag) = tag {
        // The tag may have no owner any more.
        app.events.tell_of(
            Some(sandbox.owner()),
            EventKind::SnapshotFailed,
            tag,
            Some(error.chain()),
        );
    }
}

/// Cuts a parent that is built. The parent is not resumed: its VM ends next.
pub(crate) async fn cut_parent(
    owner: &mut SandboxOwner,
    claim: Claimed,
    about: AboutParent,
) -> (Result<CutDone, Error>, Claimed) {
    let about = Box::new(about);
    let mut cut = Cut::new(owner, Destination::Parent { claim, about }, CutMode::Full);
    let result = cut.run().await;
    match cut.destination {
        Destination::Parent { claim, .. } => (result, claim),
        _ => unreachable!("a cut keeps its destination"),
    }
}

/// A cut under way.
struct Cut<'a> {
    owner: &'a mut SandboxOwner,
    destination: Destination,
    mode: CutMode,
    /// Freeze the user processes of the guest for the cut.
    freeze: bool,
    /// Build on the image that the source was started from, and not on its last cut.
    onto_start: bool,
    /// The instant is past: whatever comes of the cut, the new layers are in use.
    captured: bool,
    /// The VMM has answered that everything is written.
    written: bool,
}

impl<'a> Cut<'a> {
    fn new(owner: &'a mut SandboxOwner, destination: Destination, mode: CutMode) -> Self {
        Self {
            owner,
            destination,
            mode,
            freeze: false,
            onto_start: false,
            captured: false,
            written: false,
        }
    }

    /// The source stands still now. A VMM that fails a cut resumes the source itself.
    fn is_held(&self) -> bool {
        self.written && !self.destination.goes_on()
    }

    async fn run(&mut self) -> Result<CutDone, Error> {
        let record = self.owner.sandbox.record();
        self.choose_extent(&record);
        let app = Arc::clone(&self.owner.app);
        let headroom = headroom::raise(&app, &record, self.copied_mib(&record)).await?;
        let result = self.carry_out().await;
        if let Some(headroom) = headroom {
            headroom.lower(&app, &record).await;
        }
        result
    }

    /// Decides what the cut builds on, and whether it writes all of memory.
    fn choose_extent(&mut self, record: &SandboxRecord) {
        let capabilities = self.owner.vmm.capabilities();
        let layered = capabilities.contains(Capability::LayeredMemory);
        self.onto_start = self.is_live() && live::is_deep(record);
        if !layered || self.base(record).0.layers.len() >= MAX_MEMORY_LAYERS {
            self.mode = CutMode::Full;
        }
    }

    fn is_live(&self) -> bool {
        matches!(self.destination, Destination::Live)
    }

    /// MiB of memory that the cut writes at most.
    fn copied_mib(&self, record: &SandboxRecord) -> u64 {
        match self.mode {
            CutMode::Full => u64::from(record.memory_mib),
            CutMode::Diff => headroom::private_mib(record),
        }
    }

    async fn carry_out(&mut self) -> Result<CutDone, Error> {
        let started = Instant::now();
        let record = self.owner.sandbox.record();
        // Counts until the pages are there: from then on the host's own figures have them.
        let (place, _promised) = if self.is_live() {
            live::room(&self.owner.app, &record, self.copied_mib(&record))?
        } else {
            (Place::Disk, None)
        };
        // First of all: a process that cannot be frozen leaves nothing to undo.
        let frozen = if self.freeze {
            let sandbox = &self.owner.sandbox;
            Some(FrozenSource::freeze(sandbox.agent().await?, &sandbox.id).await?)
        } else {
            None
        };
        let files =
            CutFiles::open(self.owner, self.mode, place, self.destination.goes_on()).await?;
        let record = layers::announce(self.owner, &files.layers, |_| {}).await?;
        let report = match self.capture(&files, self.base(&record).1, frozen).await {
            Ok(report) => report,
            Err(error) => {
                if error.is_vmm_refusal() && !self.captured {
                    layers::withdraw(self.owner, files.layer_names(), |_| {}).await?;
                }
                return Err(error);
            }
        };
        metrics::histogram!("forkd_branch_pause_seconds").record(report.pause_us as f64 / 1e6);
        let done = self.publish(&record, files, &report, started).await;
        if done.is_err() {
            // The VMM would build on a cut that the store does not have: the next cut builds on the start image.
            self.owner.save(|record| record.built = None).await?;
        }
        metrics::histogram!("forkd_branch_seconds").record(started.elapsed().as_secs_f64());
        done
    }

    /// The memory that the cut builds on, and the number by which the VMM knows it.
    fn base<'r>(&self, record: &'r SandboxRecord) -> (&'r MemoryManifest, ImageId) {
        if self.onto_start {
            (&record.memory, ImageId::START)
        } else {
            record.builds_on()
        }
    }

    /// Stops the VM for the instant of the cut and waits until everything is written.
    async fn capture(
        &mut self,
        files: &CutFiles,
        onto: ImageId,
        mut frozen: Option<FrozenSource>,
    ) -> Result<CutReport, Error> {
        let mut fds = FdList::default();
        let spec = CutSpec {
            state: fds.push(&files.state),
            memory: fds.push(&files.memory),
            extent: match &files.index {
                Some(index) => CutExtent::Since {
                    image: onto,
                    index: fds.push(index),
                },
                None => CutExtent::All,
            },
            new_layers: files
                .layers
                .iter()
                .map(|layer| fds.push(&layer.file))
                .collect(),
            resume: self.destination.goes_on(),
        };
        let fds = fds.finish()?;
        let Self {
            owner,
            destination,
            captured,
            ..
        } = self;
        let reply = owner
            .call_noting(Command::Cut(spec), &fds, |event| {
                if let Event::CutTaken { pause_us, .. } = event {
                    // The source runs again, and its processes with it.
                    drop(frozen.take());
                    *captured = true;
                    destination.note_captured(pause_us);
                }
            })
            .await?;
        match reply.map_err(Error::vmm("the sandbox could not be cut"))? {
            Reply::Cut(report) => {
                self.written = true;
                Ok(report)
            }
            _ => Err(Error::Task),
        }
    }
}

impl Destination {
    /// The instant of the cut is past.
    fn note_captured(&mut self, pause_us: u64) {
        if let Some(claim) = self.claim() {
            claim.captured(pause_us);
        }
        if let Self::Tag { caller, .. } = self
            && matches!(caller, Caller::WaitsForCapture(_))
            && let Caller::WaitsForCapture(waiting) = std::mem::replace(caller, Caller::Told)
        {
            // The caller may have gone away; the reason of a later failure is kept all the same.
            let _ = waiting.send(pause_us);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::writing::WritingTags;

    #[test]
    fn a_failure_is_kept_only_for_a_caller_who_was_told() {
        let tags = WritingTags::new(|_| {});
        let tag: Tag = "t".parse().unwrap();
        let claim = || tags.claim(&tag, None).unwrap();
        free(claim(), false, Some(&Error::Task));
        assert!(tags.list().is_empty());
        free(claim(), true, None);
        assert!(tags.list().is_empty());
        free(claim(), true, Some(&Error::Task));
        assert_eq!(tags.list()[0].1.failure, Some(Error::Task.chain()));
    }
}
