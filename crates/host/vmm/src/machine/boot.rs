//! Cold boot: loads a kernel into fresh memory and puts fresh devices in.

use forkd_memory::{GuestMemory, MemoryError};
use forkd_vmm_proto::BootSpec;
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress};

use super::devices::DeviceSpec;
use super::{DeviceSetError, FdError, Fds, Machine};
use crate::arch::x86_64::acpi::{self, AcpiError, AcpiSpec};
use crate::arch::x86_64::kernel::{self, KernelError, KernelFiles};
use crate::arch::x86_64::regs::{self, BootStructures};
use crate::arch::x86_64::{layout, msr};
use crate::kvm::KvmError;

/// Why a machine did not boot.
#[derive(Debug, Error)]
pub enum BootError {
    /// The shell was filled before.
    #[error("the shell has been used")]
    Used,
    /// A descriptor is missing.
    #[error("the boot lacks a descriptor")]
    Fd(#[from] FdError),
    /// Memory could not be mapped.
    #[error("cannot map guest memory")]
    Memory(#[from] MemoryError),
    /// The devices cannot be made.
    #[error("cannot put the devices in")]
    Devices(#[from] DeviceSetError),
    /// The tables cannot be written.
    #[error("cannot describe the machine to its kernel")]
    Acpi(#[from] AcpiError),
    /// The kernel cannot be loaded.
    #[error("cannot load the kernel")]
    Kernel(#[from] KernelError),
    /// The boot structures cannot be written.
    #[error("cannot set up the boot CPU")]
    Structures(#[from] BootStructures),
    /// The generation id cannot be written.
    #[error("cannot write the generation id")]
    Generation(#[source] vm_memory::GuestMemoryError),
    #[error("cannot set up the vCPUs")]
    Kvm(#[from] KvmError),
}

/// Writes the generation id where the ACPI tables say it is.
pub(super) fn write_generation(
    memory: &GuestMemory,
    generation: [u8; 16],
) -> Result<(), vm_memory::GuestMemoryError> {
    memory.write_slice(&generation, GuestAddress(layout::GENERATION))
}

impl Machine {
    /// Fills the shell from a kernel.
    pub fn boot(&mut self, spec: BootSpec, mut fds: Fds) -> Result<(), BootError> {
        if !self.is_fresh() {
            return Err(BootError::Used);
        }
        self.spoiled = true;
        self.fill_for_boot(&spec, &mut fds)?;
        self.spoiled = false;
        self.begin(spec.run);
        Ok(())
    }

    fn fill_for_boot(&mut self, spec: &BootSpec, fds: &mut Fds) -> Result<(), BootError> {
        let files = KernelFiles {
            kernel: fds.file(spec.kernel)?,
            initramfs: spec.initramfs.map(|fd| fds.file(fd)).transpose()?,
            cmdline: spec.cmdline.clone(),
        };
        self.ram.map_zero()?;
        let devices = DeviceSpec {
            disks: &spec.disks,
            net: &spec.net,
            mac: spec.mac,
            vsock: &spec.vsock,
            console: &spec.console,
        };
        let slots = self.devices.fill(&devices, fds, &self.ram)?;
        let memory = self.ram.memory();
        let tables = AcpiSpec {
            vcpus: self.shape.vcpus,
            slots: &slots,
        };
        let rsdp = acpi::write_tables(memory, &tables)?;
        write_generation(memory, spec.generation).map_err(BootError::Generation)?;
        let entry = kernel::load(memory, self.ram.layout(), rsdp, files)?;
        let msrs = msr::boot_msrs();
        for (number, vcpu) in self.vcpus.iter().enumerate() {
            vcpu.with(|vcpu| -> Result<(), BootError> {
                vcpu.power_on(&msrs)?;
                if number == 0 {
                    let mut sregs = vcpu.sregs()?;
                    regs::set_up_sregs(memory, entry, &mut sregs)?;
                    vcpu.start_with(&regs::boot_regs(entry), &sregs)?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }
}
