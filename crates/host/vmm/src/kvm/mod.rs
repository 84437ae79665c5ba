//! KVM behind safe functions: the device ([`Hypervisor`]), a VM ([`Vm`]) and a vCPU ([`Vcpu`]).
//!
//! This is the only module of the crate with `unsafe`. State that is read here is plain data ([`VmState`],
//! [`VcpuState`]); state that is set may come from a file and was checked before
//! ([`crate::arch::x86_64::cpu_check`]).
#![allow(unsafe_code)]

mod hardening;
mod run_page;
mod stats;
mod vcpu;
mod vm;

use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};

use kvm_bindings::{KVM_API_VERSION, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm};
use thiserror::Error;

pub use run_page::RunPage;
pub use stats::Statistics;
pub use vcpu::{EXIT_BUS_LOCK, Vcpu, VcpuExit, VcpuState};
pub use vm::{Vm, VmState};

/// Why KVM did not do what was asked.
#[derive(Debug, Error)]
pub enum KvmError {
    /// An ioctl failed.
    #[error("KVM refused to {action}")]
    Refused {
        action: &'static str,
        #[source]
        source: std::io::Error,
    },
    /// The device speaks another version.
    #[error("KVM speaks version {found}, {KVM_API_VERSION} is needed")]
    Version { found: i32 },
    /// Something that cannot be done without is missing.
    #[error("KVM lacks {name}")]
    Lacks { name: &'static str },
    /// A register from a snapshot was not taken.
    #[error("the host does not take MSR {index:#x} = {value:#x} of the snapshot")]
    Msr { index: u32, value: u64 },
    /// Saved state has an impossible size.
    #[error("the saved {what} has an impossible size")]
    Size { what: &'static str },
    /// The guest's clock cannot be made to tick as it did.
    #[error(
        "the snapshot's TSC runs at {saved} kHz, the host's at {host} kHz, and it cannot scale"
    )]
    TscRate {
        /// In the snapshot.
        saved: u32,
        host: u32,
    },
}

/// Gives an ioctl's failure a name.
fn refused(action: &'static str) -> impl Fn(kvm_ioctls::Error) -> KvmError {
    move |error| KvmError::Refused {
        action,
        source: std::io::Error::from_raw_os_error(error.errno()),
    }
}

/// The KVM device.
pub struct Hypervisor {
    kvm: Kvm,
}

impl Hypervisor {
    /// Takes over an open KVM device.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, KvmError> {
        // SAFETY: the descriptor is owned and given away here; that it is the KVM device is checked by
        // the first ioctl below.
        let kvm = unsafe { Kvm::from_raw_fd(fd.into_raw_fd()) };
        Self::checked(kvm)
    }

    fn checked(kvm: Kvm) -> Result<Self, KvmError> {
        let found = kvm.get_api_version();
        if found != KVM_API_VERSION as i32 {
            return Err(KvmError::Version { found });
        }
        let needed = [
            (Cap::Irqchip, "interrupt controllers"),
            (Cap::UserMemory, "memory slots"),
            (Cap::Ioeventfd, "doorbells"),
            (Cap::Irqfd, "interrupt lines"),
            (Cap::ImmediateExit, "immediate exit"),
            (Cap::ExtCpuid, "CPUID"),
        ];
        for (cap, name) in needed {
            if !kvm.check_extension(cap) {
                return Err(KvmError::Lacks { name });
            }
        }
        Ok(Self { kvm })
    }

    /// The CPU features KVM can show a guest on this host.
    pub fn supported_cpuid(&self) -> Result<Vec<kvm_cpuid_entry2>, KvmError> {
        let cpuid = self
            .kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(refused("list CPU features"))?;
        Ok(cpuid.as_slice().to_vec())
    }

    /// The registers that make up a CPU's state beside the architectural ones.
    pub fn msr_indices(&self) -> Result<Vec<u32>, KvmError> {
        let list = self
            .kvm
            .get_msr_index_list()
            .map_err(refused("list model-specific registers"))?;
        Ok(list.as_slice().to_vec())
    }

    /// Whether guests can have the deadline timer.
    pub fn has_tsc_deadline(&self) -> bool {
        self.kvm.check_extension(Cap::TscDeadlineTimer)
    }
}
