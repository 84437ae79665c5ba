//! Checkpoints inside the VMM, and the way back to them.
//!
//! A checkpoint is a cut whose parts stay in the process: changed pages in a file, vCPU and device state, frozen
//! disk layers. A roll-back stops the machine, restores the pages that differ, then the state, and gives each
//! disk a new layer over the frozen ones. A roll-back that fails half-way ends the VM; a checkpoint that fails
//! leaves it as it was.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use forkd_devices::disk::{DiskError, DiskStack};
use forkd_devices::virtio::block::Block;
use forkd_memory::{EarlyCopy, MemoryError, PageSet, WriteOutcome, WritePlan};
use forkd_sys::ForkError;
use forkd_vmm_proto::{
    CheckpointReport, CheckpointSpec, DeviceSlot, PauseParts, RollbackReport, RollbackSpec,
    StopCause, VmmPhase,
};
use thiserror::Error;

use super::boot::write_generation;
use super::cut::{Lap, Pages};
use super::history::{Checkpoint, Fresh};
use super::{CutError, DeviceSetError, FdError, Fds, Machine, PauseError};
use crate::kvm::KvmError;
use crate::state::MachineState;

/// Why there is no checkpoint.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The number of checkpoints is at its limit.
    #[error("the machine has as many checkpoints as it can keep")]
    Full,
    /// A disk has no layers.
    #[error("the disk {slot:?} is written in place and cannot go back")]
    InPlace { slot: DeviceSlot },
    /// As a cut fails.
    #[error("cannot take the state")]
    Cut(#[from] CutError),
    /// The pages could not be kept.
    #[error("cannot keep the pages that changed")]
    Write(#[source] std::io::Error),
}

/// Why a machine did not go back.
#[derive(Debug, Error)]
pub enum RollbackError {
    /// The machine neither runs nor is paused.
    #[error("the machine is {phase:?}")]
    Phase {
        /// Where it is.
        phase: VmmPhase,
    },
    /// There is no such checkpoint.
    #[error("there is no checkpoint {id}")]
    NoCheckpoint { id: u64 },
    /// A descriptor is missing.
    #[error("the roll-back lacks a descriptor")]
    Fd(#[from] FdError),
    /// The wrong number of new layers.
    #[error("{given} new layers were given for {disks} writable disks")]
    Layers {
        /// In the request.
        given: usize,
        /// In the machine.
        disks: usize,
    },
    /// The machine could not be stopped.
    #[error("cannot stop the machine")]
    Pause(#[from] PauseError),
    /// Pages could not be put back.
    #[error("cannot put memory back")]
    Memory(#[from] MemoryError),
    /// KVM refused the state.
    #[error("cannot load the state")]
    Kvm(#[from] KvmError),
    /// The devices refused the state.
    #[error("cannot put the devices back")]
    Devices(#[from] DeviceSetError),
    /// A disk does not go back.
    #[error("the disk {slot:?} does not go back")]
    Disk {
        slot: DeviceSlot,
        #[source]
        source: DiskError,
    },
    /// The generation id cannot be written.
    #[error("cannot write the generation id")]
    Generation(#[source] vm_memory::GuestMemoryError),
}

/// A checkpoint whose pages are being written.
pub struct CheckpointInProgress {
    written: Pages,
    pages: PageSet,
    made: Checkpoint,
    started: Instant,
    report: CheckpointReport,
}

/// Result of [`Machine::checkpoint`].
pub enum CheckpointDone {
    /// Nothing has changed since the last one.
    Unchanged(CheckpointReport),
    /// The pages are being written.
    Writing(Box<CheckpointInProgress>),
}

/// Everything captured while the vCPUs were stopped.
struct CapturedCheckpoint {
    made: Checkpoint,
    written: Pages,
    pages: PageSet,
    /// Written since they were last looked at.
    fresh: Fresh,
    layers_taken: Vec<bool>,
}

impl CheckpointInProgress {
    /// How long the guest stood still.
    pub fn pause_us(&self) -> u64 {
        self.report.pause_us
    }

    /// Readable once the writer is done; `None` if the pages are written already.
    pub fn writer(&self) -> Option<BorrowedFd<'_>> {
        self.written.writer()
    }
}

impl Machine {
    /// Takes a checkpoint. When this returns the machine is as it was, running or paused.
    pub fn checkpoint(
        &mut self,
        spec: &CheckpointSpec,
        mut fds: Fds,
    ) -> Result<CheckpointDone, CheckpointError> {
        let started = Instant::now();
        if !matches!(self.phase, VmmPhase::Running | VmmPhase::Paused) {
            return Err(CutError::Phase { phase: self.phase }.into());
        }
        if !self.history.has_room() {
            return Err(CheckpointError::Full);
        }
        let memory = fds.file(spec.memory).map_err(CutError::from)?;
        let disks = self.devices.writable_disks();
        let (given, wanted) = (spec.new_layers.len(), disks.len());
        if given != wanted {
            let disks = wanted;
            return Err(CutError::Layers { given, disks }.into());
        }
        for disk in disks {
            let has_stack = disk.with(|block: &mut Block| block.stack().is_some());
            if has_stack != Some(true) {
                return Err(CheckpointError::InPlace { slot: disk.slot() });
            }
        }
        let layers = spec
            .new_layers
            .iter()
            .map(|index| fds.file(*index))
            .collect::<Result<Vec<_>, _>>()
            .map_err(CutError::from)?;
        self.size(&memory)?;
        self.history.follow(&self.ram);
        let early = self.copy_checkpoint(&memory)?;
        let was_running = self.phase == VmmPhase::Running;
        let stopped = Instant::now();
        if was_running {
            self.stop_threads().map_err(CutError::from)?;
        }
        let captured = self.capture_checkpoint(memory, layers, early);
        if was_running {
            self.go_on();
        }
        match captured? {
            Ok(captured) => {
                if let Pages::Forked(written) = &captured.written {
                    self.history.mark_shared(&self.ram, &captured.fresh);
                    written.release();
                }
                let pause_us = self.standstill(stopped).as_micros() as u64;
                Ok(CheckpointDone::Writing(Box::new(CheckpointInProgress {
                    written: captured.written,
                    pages: captured.pages,
                    made: captured.made,
                    started,
                    report: CheckpointReport {
                        pause_us,
                        layers_taken: captured.layers_taken,
                        ..CheckpointReport::default()
                    },
                })))
            }
            Err(id) => Ok(CheckpointDone::Unchanged(CheckpointReport {
                id,
                unchanged: true,
                layers_taken: vec![false; wanted],
                pause_us: self.standstill(stopped).as_micros() as u64,
                total_us: started.elapsed().as_micros() as u64,
                ..CheckpointReport::default()
            })),
        }
    }

    /// Copies the pages of a checkpoint while the machine still runs.
    fn copy_checkpoint(&mut self, memory: &File) -> Result<EarlyCopy, CutError> {
        if self.history.look_ahead(&self.ram)?.is_none() {
            return Ok(EarlyCopy::default());
        }
        let changed = self.history.since_head(&self.ram)?;
        self.copy_running(changed, memory)
    }

    /// Captures a stopped machine, or returns the number of the last checkpoint if nothing has changed since.
    fn capture_checkpoint(
        &mut self,
        memory: File,
        layers: Vec<File>,
        early: EarlyCopy,
    ) -> Result<Result<CapturedCheckpoint, u64>, CutError> {
        let fresh = self.history.written(&self.ram)?;
        let state = self.read_state()?;
        if let Some((id, last)) = self.history.unwritten_head()
            && same_cpus(&last.state, &state)
            && self.disks_untouched()
        {
            return Ok(Err(id));
        }
        // No child maps the file, so no gap between two ranges is worth filling.
        let pages = self.history.since_head(&self.ram)?;
        let plan = WritePlan {
            ranges: pages.ranges().to_vec(),
        };
        let written = self.write(plan, early, &fresh, memory.as_fd())?;
        if let Pages::Copied(_) = written {
            // Else these pages would count as changed since this checkpoint.
            self.history.mark_stopped(&self.ram, fresh.touched())?;
        }
        self.prepare_layers(&layers)?;
        let mut layers_taken = Vec::with_capacity(layers.len());
        let mut disks = Vec::with_capacity(layers.len());
        for (disk, layer) in self.devices.writable_disks().into_iter().zip(layers) {
            let slot = disk.slot();
            let kept: Option<(bool, Option<DiskStack>)> = disk
                .with(|block: &mut Block| {
                    let taken = !block.untouched();
                    if taken {
                        block.push_layer(layer)?;
                    }
                    Ok((taken, block.stack()))
                })
                .transpose()
                .map_err(|source| CutError::Disk { slot, source })?;
            if let Some((taken, Some(stack))) = kept {
                layers_taken.push(taken);
                disks.push(stack);
            }
        }
        self.history.begin_checkpoint();
        Ok(Ok(CapturedCheckpoint {
            made: Checkpoint::new(memory, state, disks),
            written,
            pages,
            fresh,
            layers_taken,
        }))
    }

    fn disks_untouched(&self) -> bool {
        self.devices
            .writable_disks()
            .iter()
            .all(|disk| disk.with(|block: &mut Block| block.untouched()) == Some(true))
    }

    /// Waits for the writer; the machine then stands on the checkpoint.
    pub fn finish_checkpoint(
        &mut self,
        progress: CheckpointInProgress,
    ) -> Result<CheckpointReport, CheckpointError> {
        let fork = |error: ForkError| CheckpointError::Cut(error.into());
        let outcome = progress.written.finish();
        let failed = match outcome {
            Ok(WriteOutcome::Done(done)) => {
                let id = self.history.checkpoint_done(progress.made, progress.pages);
                return Ok(CheckpointReport {
                    id,
                    pages_written: done.written,
                    total_us: progress.started.elapsed().as_micros() as u64,
                    ..progress.report
                });
            }
            Ok(WriteOutcome::Failed(error)) => CheckpointError::Write(error),
            Err(error) => fork(error),
        };
        self.history.checkpoint_failed(&progress.pages);
        Err(failed)
    }

    /// Drops a checkpoint. Returns false if there is none with this number.
    pub fn drop_checkpoint(&mut self, id: u64) -> bool {
        self.history.drop_checkpoint(id)
    }

    /// Rolls back to a checkpoint. The machine runs afterwards if it ran before. A failure after the first
    /// change ends the VM.
    pub fn rollback(
        &mut self,
        spec: &RollbackSpec,
        mut fds: Fds,
    ) -> Result<RollbackReport, RollbackError> {
        if !matches!(self.phase, VmmPhase::Running | VmmPhase::Paused) {
            return Err(RollbackError::Phase { phase: self.phase });
        }
        let id = spec.to;
        if self.history.checkpoint(id).is_none() {
            return Err(RollbackError::NoCheckpoint { id });
        }
        let (given, disks) = (spec.new_layers.len(), self.devices.writable_disks().len());
        if given != disks {
            return Err(RollbackError::Layers { given, disks });
        }
        let layers = spec
            .new_layers
            .iter()
            .map(|index| fds.file(*index))
            .collect::<Result<Vec<_>, _>>()?;
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
        let pages = match self.go_back(id, layers, spec.generation, &mut parts) {
            Ok(pages) => pages,
            Err(error) => {
                self.phase = VmmPhase::Paused;
                self.devices.notices().stop(StopCause::VcpuFailed);
                return Err(error);
            }
        };
        let mut lap = Lap::now();
        if was_running {
            self.start_threads();
        }
        parts.start_us = lap.next();
        Ok(RollbackReport {
            pause_us: self.standstill(stopped).as_micros() as u64,
            parts,
            pages,
        })
    }

    fn go_back(
        &mut self,
        to: u64,
        layers: Vec<File>,
        generation: [u8; 16],
        parts: &mut PauseParts,
    ) -> Result<u64, RollbackError> {
        let mut lap = Lap::now();
        self.history.written(&self.ram)?;
        parts.scan_us = lap.next();
        let pages = self.history.put_back(&self.ram, to)?;
        parts.memory_us = lap.next();
        let checkpoint = self
            .history
            .checkpoint(to)
            .ok_or(RollbackError::NoCheckpoint { id: to })?;
        let state = &checkpoint.state;
        self.vm.restore(&state.vm)?;
        for (vcpu, saved) in self.vcpus.iter().zip(&state.vcpus) {
            vcpu.with(|vcpu| vcpu.restore(saved))?;
        }
        parts.state_us = lap.next();
        let disks = self.devices.writable_disks();
        for ((disk, stack), layer) in disks.iter().zip(&checkpoint.disks).zip(layers) {
            disk.with(|block: &mut Block| block.rewind(stack, layer))
                .transpose()
                .map_err(|source| RollbackError::Disk {
                    slot: disk.slot(),
                    source,
                })?;
        }
        parts.disks_us = lap.next();
        self.devices.restore_serial(state.serial.clone())?;
        self.devices.rewind(&state.slots)?;
        write_generation(self.ram.memory(), generation).map_err(RollbackError::Generation)?;
        self.devices.announce_generation();
        parts.state_us += lap.next();
        Ok(pages)
    }
}

/// Whether registers are equal. Clocks and timers advance without a change of the machine.
fn same_cpus(one: &MachineState, other: &MachineState) -> bool {
    one.vcpus.len() == other.vcpus.len()
        && one.vcpus.iter().zip(&other.vcpus).all(|(one, other)| {
            one.regs == other.regs && one.sregs == other.sregs && one.xsave == other.xsave
        })
}
