//! One virtual machine: memory slots, doorbells, interrupt lines, clock and interrupt controllers.
//!
//! Everything that waits for grace periods in the kernel (slots, doorbells, lines) is done while the shell is
//! built, before the filter of the control thread forbids it.

use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd};

use forkd_memory::GuestRam;
use kvm_bindings::{
    KVM_CAP_ENFORCE_PV_FEATURE_CPUID, KVM_CLOCK_TSC_STABLE, KVM_IRQCHIP_IOAPIC,
    KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, IoEventAddress, VmFd};
use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use super::hardening::{Hardening, capability};
use super::{Hypervisor, KvmError, Statistics, Vcpu, refused};
use crate::arch::x86_64::layout;

/// The state of a VM beside its CPUs, memory and devices.
#[derive(Clone, Serialize, Deserialize)]
pub struct VmState {
    /// Nanoseconds of the guest's clock.
    pub clock_ns: u64,
    /// First legacy interrupt controller.
    pub pic_master: kvm_irqchip,
    /// Second legacy interrupt controller.
    pub pic_slave: kvm_irqchip,
    /// I/O interrupt controller.
    pub ioapic: kvm_irqchip,
}

/// A virtual machine.
pub struct Vm {
    fd: VmFd,
    xsave_size: usize,
    hardening: Hardening,
}

impl Vm {
    /// Creates one with its interrupt controllers. There is no timer chip: the guest's clock and timer
    /// are those of its CPUs.
    pub fn new(hypervisor: &Hypervisor) -> Result<Self, KvmError> {
        let fd = hypervisor
            .kvm
            .create_vm()
            .map_err(refused("create a virtual machine"))?;
        // Only Intel needs these two, and a KVM without hardware does not know them.
        let _ = fd.set_identity_map_address(layout::KVM_IDENTITY_MAP);
        let _ = fd.set_tss_address(layout::KVM_TSS);
        let hardening = Hardening::enable(&fd);
        fd.create_irq_chip()
            .map_err(refused("create interrupt controllers"))?;
        let xsave_size = usize::try_from(fd.check_extension_int(Cap::Xsave2))
            .unwrap_or(0)
            .max(size_of::<kvm_bindings::kvm_xsave>());
        Ok(Self {
            fd,
            xsave_size,
            hardening,
        })
    }

    /// The protections that this host's KVM does not offer.
    pub fn missing_hardening(&self) -> &[&'static str] {
        &self.hardening.missing
    }

    /// Makes the reserved range the guest's memory. What is mapped there later is what the guest sees.
    pub fn set_memory(&self, ram: &GuestRam) -> Result<(), KvmError> {
        for (slot, region) in ram.layout().regions().enumerate() {
            let slot = kvm_userspace_memory_region {
                slot: slot as u32,
                flags: 0,
                guest_phys_addr: region.guest,
                memory_size: region.len,
                userspace_addr: ram.host_address(region),
            };
            // SAFETY: the range is reserved for this guest by `ram`, which is never unmapped while the
            // process lives.
            unsafe { self.fd.set_user_memory_region(slot) }
                .map_err(refused("set a memory slot"))?;
        }
        Ok(())
    }

    /// Adds the statistics of this VM.
    pub fn add_statistics(&self, to: &mut Statistics) {
        to.add_vm(&self.fd);
    }

    /// Creates a vCPU.
    pub fn create_vcpu(&self, number: u8) -> Result<Vcpu, KvmError> {
        let fd = self
            .fd
            .create_vcpu(u64::from(number))
            .map_err(refused("create a vCPU"))?;
        if self.hardening.enforce_pv_features {
            fd.enable_cap(&capability(KVM_CAP_ENFORCE_PV_FEATURE_CPUID, 1))
                .map_err(refused("hide paravirtual features"))?;
        }
        Ok(Vcpu::new(fd, self.xsave_size))
    }

    /// Rings `bell` when the guest writes `value` as a 32-bit number to `address`.
    pub fn add_doorbell(
        &self,
        bell: BorrowedFd<'_>,
        address: u64,
        value: u32,
    ) -> Result<(), KvmError> {
        let bell = duplicate(bell)?;
        self.fd
            .register_ioevent(&bell, &IoEventAddress::Mmio(address), value)
            .map_err(refused("add a doorbell"))
    }

    /// Raises an interrupt whenever `line` is raised.
    pub fn add_interrupt(&self, line: BorrowedFd<'_>, gsi: u32) -> Result<(), KvmError> {
        let line = duplicate(line)?;
        self.fd
            .register_irqfd(&line, gsi)
            .map_err(refused("add an interrupt line"))
    }

    /// The state, with all vCPUs stopped.
    pub fn save(&self) -> Result<VmState, KvmError> {
        let clock = self.fd.get_clock().map_err(refused("read the clock"))?;
        Ok(VmState {
            clock_ns: clock.clock,
            pic_master: self.irqchip(KVM_IRQCHIP_PIC_MASTER)?,
            pic_slave: self.irqchip(KVM_IRQCHIP_PIC_SLAVE)?,
            ioapic: self.irqchip(KVM_IRQCHIP_IOAPIC)?,
        })
    }

    fn irqchip(&self, chip_id: u32) -> Result<kvm_irqchip, KvmError> {
        let mut chip = kvm_irqchip {
            chip_id,
            ..kvm_irqchip::default()
        };
        self.fd
            .get_irqchip(&mut chip)
            .map_err(refused("read an interrupt controller"))?;
        Ok(chip)
    }

    /// Takes over saved state. The clock goes on from where it was: no time has passed for the guest.
    pub fn restore(&self, state: &VmState) -> Result<(), KvmError> {
        let clock = kvm_clock_data {
            clock: state.clock_ns,
            flags: 0,
            ..kvm_clock_data::default()
        };
        debug_assert_eq!(clock.flags & KVM_CLOCK_TSC_STABLE, 0);
        self.fd
            .set_clock(&clock)
            .map_err(refused("set the clock"))?;
        for (chip, id) in [
            (&state.pic_master, KVM_IRQCHIP_PIC_MASTER),
            (&state.pic_slave, KVM_IRQCHIP_PIC_SLAVE),
            (&state.ioapic, KVM_IRQCHIP_IOAPIC),
        ] {
            let mut chip = *chip;
            chip.chip_id = id;
            self.fd
                .set_irqchip(&chip)
                .map_err(refused("set an interrupt controller"))?;
        }
        Ok(())
    }
}

/// The same event object as the type that kvm-ioctls takes.
fn duplicate(fd: BorrowedFd<'_>) -> Result<EventFd, KvmError> {
    let copy = fd
        .try_clone_to_owned()
        .map_err(|source| KvmError::Refused {
            action: "copy an event descriptor",
            source,
        })?;
    // SAFETY: the descriptor is owned and given away here; it is only handed to KVM, which checks that
    // it is an eventfd.
    Ok(unsafe { EventFd::from_raw_fd(copy.into_raw_fd()) })
}
