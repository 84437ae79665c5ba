//! Cuts: capturing a machine at one moment while it goes on.
//!
//! ```text
//!   running ──► all stopped ──► state read, process forked, disks get new layers ──► running
//!                                    └─► child writes memory ─► done ─► page map, then state written ─► report
//! ```
//!
//! [`Machine::cut`] ends when the machine runs again; [`Machine::finish_cut`] collects the writer. A failure at
//! any step leaves the machine as it was before. The state file is written last, so a complete one never
//! stands beside incomplete memory.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use forkd_devices::disk::DiskError;
use forkd_devices::virtio::block::Block;
use forkd_memory::{
    EarlyCopy, MemoryError, PageSet, WriteOutcome, WritePlan, WriteReport, Written, plan_changed,
    plan_full, plan_onto,
};
use forkd_sys::{ForkError, PageRange};
use forkd_vmm_proto::{
    CutExtent, CutReport, CutSpec, DeviceSlot, ImageId, PageMap, PageMapError, PauseParts, VmmPhase,
};
use thiserror::Error;

use super::history::Fresh;
use super::{FdError, Fds, Machine, PauseError};
use crate::kvm::KvmError;
use crate::state::{MachineState, StateError};

/// Pages that are copied before the machine stops, at most: 64 MiB. The control thread does nothing else meanwhile.
const MAX_EARLY: u64 = 16 << 10;
/// How often the pages that were written meanwhile are copied again.
const EARLY_ROUNDS: usize = 3;
/// Pages that are copied while the machine stands still, at most. A fork is faster for more.
const MAX_LATE: u64 = 512;

/// Why there is no cut.
#[derive(Debug, Error)]
pub enum CutError {
    /// The machine neither runs nor is paused.
    #[error("the machine is {phase:?}")]
    Phase {
        /// Where it is.
        phase: VmmPhase,
    },
    /// A descriptor is missing.
    #[error("the cut lacks a descriptor")]
    Fd(#[from] FdError),
    /// The wrong number of new layers.
    #[error("{given} new layers were given for {disks} writable disks")]
    Layers {
        /// In the request.
        given: usize,
        /// In the machine.
        disks: usize,
    },
    /// The image to build on is neither the start nor the last cut.
    #[error("there is no image {} to build on", image.0)]
    NoImage { image: ImageId },
    /// The machine could not be stopped.
    #[error("cannot stop the machine")]
    Pause(#[from] PauseError),
    /// State cannot be read.
    #[error("cannot read the state")]
    Kvm(#[from] KvmError),
    /// State cannot be put into a file.
    #[error("cannot encode the state")]
    State(#[from] StateError),
    /// The changed pages cannot be determined.
    #[error("cannot find out what to write")]
    Memory(#[from] MemoryError),
    /// The writer cannot be started, or died.
    #[error("the memory writer failed")]
    Fork(#[from] ForkError),
    /// A disk does not take its new layer.
    #[error("the disk {slot:?} does not take its new layer")]
    Disk {
        slot: DeviceSlot,
        #[source]
        source: DiskError,
    },
    /// A disk cannot be flushed.
    #[error("the disk {slot:?} cannot be flushed")]
    Flush {
        slot: DeviceSlot,
        #[source]
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write the {what}")]
    Write {
        what: &'static str,
        #[source]
        source: io::Error,
    },
    /// The page map would have too many pieces.
    #[error("cannot make the page map")]
    PageMap(#[from] PageMapError),
}

/// The files of a cut.
struct Files {
    state: File,
    memory: File,
    index: Option<File>,
    layers: Vec<File>,
}

/// How the pages of a cut get into its file.
pub(super) enum Pages {
    /// A forked process writes them.
    Forked(Written),
    /// They are there.
    Copied(WriteReport),
}

impl Pages {
    /// Readable once the writer is done; `None` if there is none to wait for.
    pub(super) fn writer(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Forked(written) => Some(written.as_fd()),
            Self::Copied(_) => None,
        }
    }

    /// Waits until all pages are in the file.
    pub(super) fn finish(self) -> Result<WriteOutcome, ForkError> {
        match self {
            Self::Forked(written) => written.finish(),
            Self::Copied(report) => Ok(WriteOutcome::Done(report)),
        }
    }
}

/// A cut whose memory is being written.
pub struct CutInProgress {
    pages: Pages,
    /// The page map below, if the cut holds changed pages only.
    onto: Option<PageMap>,
    index: Option<File>,
    state: (File, Vec<u8>),
    /// Pages that count as changed again if this cut fails.
    settled: PageSet,
    started: Instant,
    stays_paused: bool,
    report: CutReport,
}

/// A captured cut.
pub struct CutDone {
    /// The part that goes on in the background.
    pub progress: CutInProgress,
    /// How long the guest stood still; none if it stays paused.
    pub pause: Option<Duration>,
}

impl Machine {
    /// Takes the state. When this returns the machine runs again if that was asked for; memory is still being
    /// written, and the state follows it.
    pub fn cut(&mut self, spec: &CutSpec, mut fds: Fds) -> Result<CutDone, CutError> {
        let started = Instant::now();
        if !matches!(self.phase, VmmPhase::Running | VmmPhase::Paused) {
            return Err(CutError::Phase { phase: self.phase });
        }
        let mut files = self.take_files(spec, &mut fds)?;
        self.size(&files.memory)?;
        self.history.follow(&self.ram);
        let early = self.copy_early(spec, &files)?;
        let image_ranges = match self.ram.image() {
            Some(image) if spec.extent == CutExtent::All => {
                plan_full(Vec::new(), Some(image)).ranges
            }
            _ => Vec::new(),
        };
        let was_running = self.phase == VmmPhase::Running;
        let stopped = Instant::now();
        if was_running {
            self.stop_threads()?;
        }
        let mut lap = Lap(stopped);
        let mut parts = PauseParts {
            stop_us: lap.next(),
            ..PauseParts::default()
        };
        let captured = self.capture(spec, &mut files, image_ranges, early, &mut parts);
        let mut lap = Lap::now();
        let goes_on = was_running && (spec.resume || captured.is_err());
        if goes_on {
            self.go_on();
        } else {
            self.phase = VmmPhase::Paused;
        }
        parts.start_us = lap.next();
        let captured = captured?;
        let settled = self.history.begin_cut();
        if let Pages::Forked(written) = &captured.pages {
            self.history.mark_shared(&self.ram, &captured.fresh);
            written.release();
        }
        let pause = self.standstill(stopped);
        let stays_paused = was_running && !goes_on;
        let state = match captured.state.encode() {
            Ok(bytes) => bytes,
            Err(error) => {
                self.history.cut_failed(&settled);
                if stays_paused {
                    self.resume()?;
                }
                return Err(error.into());
            }
        };
        Ok(CutDone {
            progress: CutInProgress {
                pages: captured.pages,
                onto: captured.onto,
                index: files.index,
                settled,
                started,
                stays_paused,
                report: CutReport {
                    pause_us: pause.as_micros() as u64,
                    parts,
                    state_bytes: state.len() as u64,
                    ..CutReport::default()
                },
                state: (files.state, state),
            },
            pause: goes_on.then_some(pause),
        })
    }

    pub(super) fn size(&self, memory: &File) -> Result<(), CutError> {
        self.ram
            .size_file(memory.as_fd())
            .map_err(|source| CutError::Write {
                what: "memory file",
                source,
            })
    }

    fn take_files(&self, spec: &CutSpec, fds: &mut Fds) -> Result<Files, CutError> {
        let disks = self.devices.writable_disks().len();
        let given = spec.new_layers.len();
        if given != disks && (given != 0 || spec.resume) {
            return Err(CutError::Layers { given, disks });
        }
        Ok(Files {
            state: fds.file(spec.state)?,
            memory: fds.file(spec.memory)?,
            index: match spec.extent {
                CutExtent::All => None,
                CutExtent::Since { index, .. } => Some(fds.file(index)?),
            },
            layers: spec
                .new_layers
                .iter()
                .map(|index| fds.file(*index))
                .collect::<Result<_, _>>()?,
        })
    }

    /// Captures a stopped machine.
    fn capture(
        &mut self,
        spec: &CutSpec,
        files: &mut Files,
        image_ranges: Vec<PageRange>,
        early: EarlyCopy,
        parts: &mut PauseParts,
    ) -> Result<CapturedCut, CutError> {
        let mut lap = Lap::now();
        let state = self.read_state()?;
        parts.state_us = lap.next();
        let fresh = self.history.written(&self.ram)?;
        let (plan, onto) = self.plan(spec, image_ranges)?;
        parts.scan_us = lap.next();
        let pages = self.write(plan, early, &fresh, files.memory.as_fd())?;
        parts.memory_us = lap.next();
        // A failure from here on drops `pages`, which ends the writer.
        if files.layers.is_empty() {
            for disk in self.devices.writable_disks() {
                let slot = disk.slot();
                disk.with(|block: &mut Block| block.flush())
                    .transpose()
                    .map_err(|source| CutError::Flush { slot, source })?;
            }
        } else {
            self.prepare_layers(&files.layers)?;
            for (disk, layer) in self
                .devices
                .writable_disks()
                .into_iter()
                .zip(files.layers.drain(..))
            {
                let slot = disk.slot();
                disk.with(|block: &mut Block| block.push_layer(layer))
                    .transpose()
                    .map_err(|source| CutError::Disk { slot, source })?;
            }
        }
        parts.disks_us = lap.next();
        Ok(CapturedCut {
            state,
            pages,
            onto,
            fresh,
        })
    }

    /// Copies the pages of a cut while the machine still runs.
    fn copy_early(&mut self, spec: &CutSpec, files: &Files) -> Result<EarlyCopy, CutError> {
        let early = EarlyCopy::default();
        let followed = self.history.look_ahead(&self.ram)?.is_some();
        let CutExtent::Since { image, .. } = spec.extent else {
            return Ok(early);
        };
        let known = self
            .history
            .since_image(&self.ram, image)?
            .ok_or(CutError::NoImage { image })?;
        // Without a map below it, all of the file is the image, and pages that the guest gives back must be holes.
        let (changed, Some(_)) = known else {
            return Ok(early);
        };
        if !followed {
            return Ok(early);
        }
        let plan = plan_changed(changed.ranges().to_vec());
        self.copy_running(PageSet::new(plan.ranges), &files.memory)
    }

    /// Copies pages while the machine still runs, so that few are left for the pause. A guest that writes faster than
    /// its pages are copied, and a large set of pages, are left to a forked process. Writes are followed, and all pages
    /// have been marked.
    pub(super) fn copy_running(
        &mut self,
        mut pages: PageSet,
        file: &File,
    ) -> Result<EarlyCopy, CutError> {
        let mut early = EarlyCopy::default();
        if self.phase != VmmPhase::Running || pages.pages() > MAX_EARLY {
            return Ok(early);
        }
        for _ in 0..EARLY_ROUNDS {
            early
                .copy(&self.ram, file.as_fd(), &pages)
                .map_err(|source| CutError::Write {
                    what: "memory file",
                    source,
                })?;
            let before = pages.pages();
            // Also marks pages of the image that the copy brought in.
            pages = self.history.look_ahead(&self.ram)?.unwrap_or_default();
            early.outdate(&pages);
            if pages.pages() <= MAX_LATE / 2 || pages.pages() > before / 2 {
                break;
            }
        }
        Ok(early)
    }

    /// Writes what the early copy lacks: at once if that is little, by a forked process if not.
    pub(super) fn write(
        &self,
        plan: WritePlan,
        mut early: EarlyCopy,
        fresh: &Fresh,
        file: BorrowedFd<'_>,
    ) -> Result<Pages, CutError> {
        if early.pages().is_empty() && plan.pages() > MAX_LATE {
            return Ok(Pages::Forked(self.ram.write_frozen(plan, file)?));
        }
        let wanted = PageSet::new(plan.ranges.clone());
        let missing = early.missing(&wanted, &fresh.changed());
        if missing.pages() > MAX_LATE {
            let written = self.ram.write_missing(plan, file, &early, &missing)?;
            return Ok(Pages::Forked(written));
        }
        early
            .copy(&self.ram, file, &missing)
            .map_err(|source| CutError::Write {
                what: "memory file",
                source,
            })?;
        Ok(Pages::Copied(early.report(plan.ranges)))
    }

    /// Does the fallible part of adding layers to several disks before the first disk gets one. A single disk
    /// is unchanged by a failure, so it needs no preparation, which would lengthen the pause.
    pub(super) fn prepare_layers(&self, layers: &[File]) -> Result<(), CutError> {
        if layers.len() < 2 {
            return Ok(());
        }
        for (disk, layer) in self.devices.writable_disks().into_iter().zip(layers) {
            let slot = disk.slot();
            disk.with(|block: &mut Block| block.prepare_layer(layer))
                .transpose()
                .map_err(|source| CutError::Disk { slot, source })?;
        }
        Ok(())
    }

    pub(super) fn read_state(&self) -> Result<MachineState, CutError> {
        let vcpus = self
            .vcpus
            .iter()
            .map(|vcpu| vcpu.with(|vcpu| vcpu.save(&self.msr_indices)))
            .collect::<Result<Vec<_>, _>>()?;
        let (slots, serial) = self.devices.save();
        Ok(MachineState {
            shape: self.shape,
            vm: self.vm.save()?,
            vcpus,
            slots,
            serial,
        })
    }

    /// The pages to write, and the map they change.
    fn plan(
        &self,
        spec: &CutSpec,
        image_ranges: Vec<PageRange>,
    ) -> Result<(WritePlan, Option<PageMap>), CutError> {
        if let CutExtent::Since { image, .. } = spec.extent {
            let (pages, map) = self
                .history
                .since_image(&self.ram, image)?
                .ok_or(CutError::NoImage { image })?;
            let changed = pages.ranges().to_vec();
            let Some(map) = map else {
                return Ok((plan_changed(changed), None));
            };
            let (plan, map) = plan_onto(map, changed, || self.all_pages())?;
            return Ok((plan, Some(map)));
        }
        let mut ranges = self.history.private(&self.ram)?.ranges().to_vec();
        ranges.extend(image_ranges);
        ranges.sort_by_key(|range| range.first);
        Ok((plan_full(ranges, None), None))
    }

    /// All pages that are not known to be zero.
    fn all_pages(&self) -> Result<Vec<PageRange>, MemoryError> {
        let private = self.history.private(&self.ram)?.ranges().to_vec();
        Ok(plan_full(private, self.ram.image()).ranges)
    }

    /// Waits for the writer and gives the report. A cut that fails leaves no trace in the machine.
    pub fn finish_cut(&mut self, cut: CutInProgress) -> Result<CutReport, CutError> {
        let pages = self.ram.layout().pages();
        let CutInProgress {
            pages: written,
            onto,
            index,
            state,
            settled,
            started,
            report,
            ..
        } = cut;
        match finish(written, onto, index, state, pages) {
            Ok((written, map)) => Ok(CutReport {
                image: self.history.cut_done(map),
                pages_written: written.written,
                zero_pages: written.zero,
                total_us: started.elapsed().as_micros() as u64,
                ..report
            }),
            Err(error) => {
                self.history.cut_failed(&settled);
                Err(error)
            }
        }
    }
}

/// Waits for the writer, and writes the map of the image that the cut is.
fn finish(
    written: Pages,
    onto: Option<PageMap>,
    index: Option<File>,
    (mut state_file, state): (File, Vec<u8>),
    pages: u32,
) -> Result<(WriteReport, PageMap), CutError> {
    let written = match written.finish()? {
        WriteOutcome::Done(written) => written,
        WriteOutcome::Failed(source) => {
            return Err(CutError::Write {
                what: "memory file",
                source,
            });
        }
    };
    let map = match onto {
        Some(map) => map.overlay(&written.changes())?,
        None => PageMap::identity(pages),
    };
    if let (Some(mut file), true) = (index, map.layers() > 1) {
        write_whole(&mut file, &map.encode(), "page map")?;
    }
    // The state comes last: a state file that is whole never stands beside memory that is not.
    write_whole(&mut state_file, &state, "state file")?;
    Ok((written, map))
}

/// A stop watch for the parts of a pause.
pub(super) struct Lap(pub(super) Instant);

impl Lap {
    /// From now on.
    pub(super) fn now() -> Self {
        Self(Instant::now())
    }

    /// Microseconds since it was last asked.
    pub(super) fn next(&mut self) -> u64 {
        let now = Instant::now();
        let passed = now.duration_since(std::mem::replace(&mut self.0, now));
        passed.as_micros() as u64
    }
}

/// Everything captured while the vCPUs were stopped.
struct CapturedCut {
    state: MachineState,
    pages: Pages,
    onto: Option<PageMap>,
    /// Written since they were last looked at.
    fresh: Fresh,
}

impl CutInProgress {
    /// Readable once the writer is done; `None` if the pages are written already.
    pub fn writer(&self) -> Option<BorrowedFd<'_>> {
        self.pages.writer()
    }

    /// Whether the machine ran before and stands still because the cut was asked to leave it so. If the
    /// cut fails after all it must go on.
    pub fn stays_paused(&self) -> bool {
        self.stays_paused
    }
}

fn write_whole(file: &mut File, bytes: &[u8], what: &'static str) -> Result<(), CutError> {
    file.rewind()
        .and_then(|()| file.set_len(0))
        .and_then(|()| file.write_all(bytes))
        .map_err(|source| CutError::Write { what, source })
}
