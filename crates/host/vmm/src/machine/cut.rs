//! Taking the state of a machine at one instant.
//!
//! ```text
//!   running ──► all stopped ──► state read, process forked, disks get new layers ──► running
//!                                    └─► child writes memory ─► done ─► page map, then state written ─► report
//! ```
//!
//! Whatever fails between stopping and going on, the machine is as it was before.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use forkd_devices::disk::DiskError;
use forkd_devices::virtio::block::Block;
use forkd_memory::{MemoryError, WriteOutcome, WritePlan, Written, plan_changed, plan_full};
use forkd_sys::{ForkError, PageRange};
use forkd_vmm_proto::{CutReport, CutSpec, DeviceSlot, PageMap, PageMapError, VmmPhase};
use thiserror::Error;

use super::{FdError, Fds, Machine, PauseError};
use crate::kvm::KvmError;
use crate::state::{MachineState, StateError};

/// Why there is no cut.
#[derive(Debug, Error)]
pub enum CutError {
    /// There is nothing to cut.
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
    /// Only what changed, but nowhere to say what that is.
    #[error("a cut of only what changed needs a place for its page map")]
    NoIndex,
    /// The machine could not be stopped.
    #[error("cannot stop the machine")]
    Pause(#[from] PauseError),
    /// State cannot be read.
    #[error("cannot read the state")]
    Kvm(#[from] KvmError),
    /// State cannot be put into a file.
    #[error("cannot encode the state")]
    State(#[from] StateError),
    /// What changed cannot be found out.
    #[error("cannot find out what to write")]
    Memory(#[from] MemoryError),
    /// The writer cannot be started, or died.
    #[error("the memory writer failed")]
    Fork(#[from] ForkError),
    /// A disk does not take its new layer.
    #[error("the disk {slot:?} does not take its new layer")]
    Disk {
        /// Which.
        slot: DeviceSlot,
        /// Why.
        #[source]
        source: DiskError,
    },
    /// A disk cannot be flushed.
    #[error("the disk {slot:?} cannot be flushed")]
    Flush {
        /// Which.
        slot: DeviceSlot,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write the {what}")]
    Write {
        /// Which.
        what: &'static str,
        /// Why.
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

/// A cut whose memory is being written. Readable once the writer is done.
pub struct CutInProgress {
    written: Written,
    index: Option<(File, PageMap)>,
    state: (File, Vec<u8>),
    started: Instant,
    stays_paused: bool,
    report: CutReport,
}

/// A captured cut.
pub struct CutDone {
    /// What goes on in the background.
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
        let image_ranges = match self.ram.image() {
            Some(image) if !spec.only_changed => plan_full(Vec::new(), Some(image)).ranges,
            _ => Vec::new(),
        };
        let was_running = self.phase == VmmPhase::Running;
        let stopped = Instant::now();
        if was_running {
            self.stop_threads()?;
        }
        let captured = self.capture(spec, &mut files, image_ranges);
        let goes_on = was_running && (spec.resume || captured.is_err());
        if goes_on {
            for vcpu in &self.vcpus {
                vcpu.with(|vcpu| vcpu.note_pause());
            }
            self.start_threads();
        } else {
            self.phase = VmmPhase::Paused;
        }
        let pause = stopped.elapsed();
        let (state, written) = captured?;
        let stays_paused = was_running && !goes_on;
        let state = match state.encode() {
            Ok(bytes) => bytes,
            Err(error) => {
                if stays_paused {
                    self.resume()?;
                }
                return Err(error.into());
            }
        };
        let index = match (files.index, self.ram.image()) {
            (Some(file), Some(image)) if spec.only_changed => Some((file, image.map().clone())),
            _ => None,
        };
        Ok(CutDone {
            progress: CutInProgress {
                written,
                index,
                report: CutReport {
                    pause_us: pause.as_micros() as u64,
                    state_bytes: state.len() as u64,
                    ..CutReport::default()
                },
                state: (files.state, state),
                started,
                stays_paused,
            },
            pause: goes_on.then_some(pause),
        })
    }

    fn take_files(&self, spec: &CutSpec, fds: &mut Fds) -> Result<Files, CutError> {
        let disks = self.devices.writable_disks().len();
        let given = spec.new_layers.len();
        if given != disks && (given != 0 || spec.resume) {
            return Err(CutError::Layers { given, disks });
        }
        if spec.only_changed && spec.index.is_none() && self.ram.image().is_some() {
            return Err(CutError::NoIndex);
        }
        Ok(Files {
            state: fds.file(spec.state)?,
            memory: fds.file(spec.memory)?,
            index: spec.index.map(|index| fds.file(index)).transpose()?,
            layers: spec
                .new_layers
                .iter()
                .map(|index| fds.file(*index))
                .collect::<Result<_, _>>()?,
        })
    }

    /// Everything that has to happen while nothing moves.
    fn capture(
        &self,
        spec: &CutSpec,
        files: &mut Files,
        image_ranges: Vec<PageRange>,
    ) -> Result<(MachineState, Written), CutError> {
        let state = self.read_state()?;
        let plan = self.plan(spec, image_ranges)?;
        let written = self.ram.write_frozen(plan, files.memory.as_fd())?;
        // A failure from here on drops `written`, which ends the child.
        if files.layers.is_empty() {
            for disk in self.devices.writable_disks() {
                let slot = disk.slot();
                disk.with(|block: &mut Block| block.flush())
                    .transpose()
                    .map_err(|source| CutError::Flush { slot, source })?;
            }
        } else {
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
        Ok((state, written))
    }

    fn read_state(&self) -> Result<MachineState, CutError> {
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

    fn plan(&self, spec: &CutSpec, image_ranges: Vec<PageRange>) -> Result<WritePlan, CutError> {
        let private = match &self.pagemap {
            Ok(pagemap) => self.ram.private_pages(pagemap)?,
            // Without a page map every page may have changed.
            Err(_) => vec![PageRange {
                first: 0,
                count: u64::from(self.ram.layout().pages()),
            }],
        };
        if spec.only_changed {
            return Ok(plan_changed(private));
        }
        let mut ranges = private;
        ranges.extend(image_ranges);
        ranges.sort_by_key(|range| range.first);
        Ok(plan_full(ranges, None))
    }
}

impl AsFd for CutInProgress {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.written.as_fd()
    }
}

impl CutInProgress {
    /// Whether the machine ran before and stands still because the cut was asked to leave it so. If the
    /// cut fails after all it must go on.
    pub fn stays_paused(&self) -> bool {
        self.stays_paused
    }

    /// Waits for the writer and gives the report.
    pub fn finish(self) -> Result<CutReport, CutError> {
        let written = match self.written.finish()? {
            WriteOutcome::Done(written) => written,
            WriteOutcome::Failed(source) => {
                return Err(CutError::Write {
                    what: "memory file",
                    source,
                });
            }
        };
        if let Some((mut file, map)) = self.index {
            let map = map.overlay(&written.changes())?;
            write_synced(&mut file, &map.encode(), "page map")?;
        }
        // The state comes last: a state file that is whole never stands beside memory that is not.
        let (mut file, state) = self.state;
        write_synced(&mut file, &state, "state file")?;
        Ok(CutReport {
            pages_written: written.written,
            zero_pages: written.zero,
            total_us: self.started.elapsed().as_micros() as u64,
            ..self.report
        })
    }
}

fn write_synced(file: &mut File, bytes: &[u8], what: &'static str) -> Result<(), CutError> {
    file.rewind()
        .and_then(|()| file.set_len(0))
        .and_then(|()| file.write_all(bytes))
        .and_then(|()| file.sync_all())
        .map_err(|source| CutError::Write { what, source })
}
