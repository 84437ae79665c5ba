//! Restore: fills a shell from a snapshot.
//!
//! All files are untrusted. They are read and checked in full before the shell changes, so a refused snapshot
//! leaves the shell usable; a failure after that spoils it. Interrupt controllers are restored before devices,
//! which may raise an interrupt at once.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use forkd_memory::{ImageLayers, MemoryError, PAGE_SIZE, WorkingSet, WorkingSetError};
use forkd_vmm_proto::{MemoryImage, PageIndex, PageMap, PageMapError, RestoreSpec, Shape};
use thiserror::Error;

use super::boot::write_generation;
use super::devices::DeviceSpec;
use super::{DeviceSetError, FdError, Fds, Machine};
use crate::arch::x86_64::cpu_check::{self, CpuMismatch};
use crate::arch::x86_64::cpuid;
use crate::kvm::KvmError;
use crate::state::{MAX_STATE, MachineState, StateError};

/// Why a machine did not start from a snapshot.
#[derive(Debug, Error)]
pub enum RestoreError {
    /// The shell was filled before.
    #[error("the shell has been used")]
    Used,
    /// A descriptor is missing.
    #[error("the restore lacks a descriptor")]
    Fd(#[from] FdError),
    /// A file cannot be read.
    #[error("cannot read the {what}")]
    Read {
        what: &'static str,
        #[source]
        source: io::Error,
    },
    /// A file is larger than any of its kind.
    #[error("the {what} is larger than {limit} bytes")]
    TooLarge { what: &'static str, limit: usize },
    /// The state file is invalid.
    #[error("cannot use the state file")]
    State(#[from] StateError),
    /// The snapshot is of another shape than the shell.
    #[error("the snapshot is of a machine with {saved}, the shell has {shell}")]
    Shape {
        /// Of the snapshot.
        saved: Shape,
        /// Of the shell.
        shell: Shape,
    },
    /// The CPU of the snapshot differs from those that this host shows.
    #[error("this host cannot run vCPU {vcpu} of the snapshot")]
    Cpu {
        /// Number of the vCPU.
        vcpu: u8,
        #[source]
        source: CpuMismatch,
    },
    /// The page map is invalid.
    #[error("cannot use the page map")]
    PageMap(#[from] PageMapError),
    /// Memory could not be mapped.
    #[error("cannot map guest memory")]
    Memory(#[from] MemoryError),
    /// KVM refused the state.
    #[error("cannot load the state")]
    Kvm(#[from] KvmError),
    /// The devices refused the state.
    #[error("cannot put the devices in")]
    Devices(#[from] DeviceSetError),
    /// The generation id cannot be written.
    #[error("cannot write the generation id")]
    Generation(#[source] vm_memory::GuestMemoryError),
    /// The working set is invalid.
    #[error("cannot use the working set")]
    WorkingSet(#[from] WorkingSetError),
}

/// A snapshot that was read and checked.
struct Parsed {
    state: MachineState,
    image: ImageLayers,
    prefault: Option<WorkingSet>,
}

impl Machine {
    /// Fills the shell from a snapshot. A snapshot that is refused leaves the shell fresh.
    pub fn restore(&mut self, spec: RestoreSpec, mut fds: Fds) -> Result<(), RestoreError> {
        if !self.is_fresh() {
            return Err(RestoreError::Used);
        }
        let parsed = self.parse(&spec, &mut fds)?;
        self.spoiled = true;
        self.fill_from(parsed, &spec, &mut fds)?;
        self.spoiled = false;
        self.begin(spec.run);
        Ok(())
    }

    fn parse(&self, spec: &RestoreSpec, fds: &mut Fds) -> Result<Parsed, RestoreError> {
        let bytes = read_bounded(&fds.file(spec.state)?, "state file", MAX_STATE)?;
        let mut state = MachineState::decode(&bytes)?;
        if state.shape != self.shape {
            return Err(RestoreError::Shape {
                saved: state.shape,
                shell: self.shape,
            });
        }
        for (number, saved) in (0..).zip(&mut state.vcpus) {
            let shown = cpuid::for_vcpu(&self.shown, number);
            cpu_check::check(saved, &shown, &self.msr_indices).map_err(|source| {
                RestoreError::Cpu {
                    vcpu: number,
                    source,
                }
            })?;
            // Those that this host lacks are zero.
            saved
                .msrs
                .retain(|msr| self.msr_indices.contains(&msr.index));
        }
        let image = self.parse_image(&spec.memory, fds)?;
        let prefault = match spec.prefault {
            Some(index) => {
                let limit = WorkingSet::max_encoded_len();
                let bytes = read_bounded(&fds.file(index)?, "working set", limit)?;
                Some(WorkingSet::decode(&bytes, self.ram.layout().pages())?)
            }
            None => None,
        };
        Ok(Parsed {
            state,
            image,
            prefault,
        })
    }

    fn parse_image(&self, image: &MemoryImage, fds: &mut Fds) -> Result<ImageLayers, RestoreError> {
        let map = match image.index {
            PageIndex::Identity => PageMap::identity(self.ram.layout().pages()),
            PageIndex::File(index) => {
                let limit = PageMap::max_encoded_len();
                PageMap::decode(&read_bounded(&fds.file(index)?, "page map", limit)?)?
            }
        };
        let layers = image
            .layers
            .iter()
            .map(|index| fds.take(*index))
            .collect::<Result<Vec<_>, _>>()?;
        let image = ImageLayers::new(map, layers)?;
        let (found, expected) = (image.map().pages(), self.ram.layout().pages());
        if found != expected {
            return Err(MemoryError::Size {
                found: u64::from(found),
                expected: u64::from(expected),
            }
            .into());
        }
        Ok(image)
    }

    fn fill_from(
        &mut self,
        parsed: Parsed,
        spec: &RestoreSpec,
        fds: &mut Fds,
    ) -> Result<(), RestoreError> {
        let Parsed {
            state,
            image,
            prefault,
        } = parsed;
        self.ram.map_image(image)?;
        // Interrupt controllers come before the devices, which may raise an interrupt at once.
        self.vm.restore(&state.vm)?;
        for (vcpu, saved) in self.vcpus.iter().zip(&state.vcpus) {
            vcpu.with(|vcpu| vcpu.restore(saved))?;
        }
        let devices = DeviceSpec {
            disks: &spec.disks,
            net: &spec.net,
            // The state has the address.
            mac: [0; 6],
            vsock: &spec.vsock,
            console: &spec.console,
        };
        self.devices.restore_serial(state.serial)?;
        self.devices
            .restore(&devices, fds, &self.ram, state.slots)?;
        write_generation(self.ram.memory(), spec.generation).map_err(RestoreError::Generation)?;
        self.devices.announce_generation();
        match prefault {
            Some(set) => self.bring_in(&set)?,
            // The set of this machine may be recorded. Without it the kernel would map neighbours of touched pages.
            None => self.history.follow(&self.ram),
        }
        Ok(())
    }

    /// Makes the pages of a working set present, in the page tables of the guest as well where KVM can.
    fn bring_in(&self, set: &WorkingSet) -> Result<(), MemoryError> {
        set.populate_written(&self.ram)?;
        let given = self.vcpus.first().is_some_and(|vcpu| {
            vcpu.with(|vcpu| {
                let layout = self.ram.layout();
                set.pages().ranges().iter().all(|range| {
                    let (offset, len) = (range.first * PAGE_SIZE, range.count * PAGE_SIZE);
                    let mut pieces = layout.guest_pieces(offset, len);
                    pieces.all(|(guest, len)| vcpu.pre_fault(guest, len).is_ok())
                })
            })
        });
        if given {
            return Ok(());
        }
        set.populate_read(&self.ram)
    }
}

/// Reads a whole file if it is not over the limit. By offset: many children may be handed the same open file.
fn read_bounded(file: &File, what: &'static str, limit: usize) -> Result<Vec<u8>, RestoreError> {
    let read = |source| RestoreError::Read { what, source };
    let size = file.metadata().map_err(read)?.len();
    let size = usize::try_from(size)
        .ok()
        .filter(|size| *size <= limit)
        .ok_or(RestoreError::TooLarge { what, limit })?;
    let mut bytes = vec![0; size];
    file.read_exact_at(&mut bytes, 0).map_err(read)?;
    Ok(bytes)
}
