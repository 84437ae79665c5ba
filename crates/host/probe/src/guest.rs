//! The temporary VM of the probe: one vCPU in 64-bit kernel mode that counts down in a loop.
//!
//! [`Guest::count_down`] runs the loop once and returns at its `out` instruction. [`interrupt`] ends a
//! `KVM_RUN` that takes too long.
#![allow(unsafe_code)]

use std::ffi::CString;

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment, kvm_sregs, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

const MEMORY_SIZE: usize = 2 << 20;
const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PD: u64 = 0x3000;
const CODE: u64 = 0x10_000;
/// Address of the loop count.
const COUNT: u64 = 0x11_000;
const DONE_PORT: u8 = 0xe9;

const PRESENT_WRITABLE: u64 = 0b11;
const LARGE_PAGE: u64 = 1 << 7;
const CR0_PE_MP_ET_NE_WP_AM_PG: u64 = 0x8005_0033;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME_LMA: u64 = 1 << 8 | 1 << 10;
/// Bit 1 of the flags is always set.
pub(crate) const RFLAGS_RESERVED: u64 = 1 << 1;

const KVM_API_VERSION: i32 = 12;
const VMX_BIT: u32 = 1 << 5;
const SVM_BIT: u32 = 1 << 2;

/// Why guest code could not be run.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    #[error("cannot open the device: {}", std::io::Error::from_raw_os_error(*errno))]
    Open {
        /// The error number of `open(2)`.
        errno: i32,
    },
    /// The device speaks another version of the interface, or is not KVM.
    #[error("KVM interface version is {found}, not {KVM_API_VERSION}")]
    Version { found: i32 },
    #[error("cannot {step}: {}", std::io::Error::from_raw_os_error(*errno))]
    Ioctl { step: &'static str, errno: i32 },
    #[error("cannot map guest memory")]
    Memory,
    /// The guest exited for another reason than its `out` instruction.
    #[error("the guest stopped with {exit}")]
    Exit { exit: String },
}

pub(crate) fn ioctl(step: &'static str) -> impl Fn(kvm_ioctls::Error) -> GuestError {
    move |error| GuestError::Ioctl {
        step,
        errno: error.errno(),
    }
}

/// A VM with one vCPU, ready to run. Fields drop in order: vCPU and VM before the memory they use.
pub struct Guest {
    vcpu: VcpuFd,
    _vm: VmFd,
    memory: GuestMemoryMmap,
    nesting: bool,
}

impl Guest {
    /// Creates the VM with its memory and its vCPU.
    pub fn create(device: &CString) -> Result<Self, GuestError> {
        let kvm = Kvm::new_with_path(device.as_c_str()).map_err(|error| GuestError::Open {
            errno: error.errno(),
        })?;
        let version = kvm.get_api_version();
        if version != KVM_API_VERSION {
            return Err(GuestError::Version { found: version });
        }
        let cpuid = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(ioctl("read the supported CPU features"))?;
        let vm = kvm.create_vm().map_err(ioctl("create a VM"))?;
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_SIZE)])
            .map_err(|_| GuestError::Memory)?;
        write_guest(&memory).map_err(|_| GuestError::Memory)?;
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: MEMORY_SIZE as u64,
            userspace_addr: memory
                .get_host_address(GuestAddress(0))
                .map_err(|_| GuestError::Memory)? as u64,
        };
        // SAFETY: the region is exactly the mapping owned by `memory`, which outlives the VM: both
        // live in `Guest`, whose `vm` field drops first.
        unsafe { vm.set_user_memory_region(region) }.map_err(ioctl("give the VM memory"))?;
        let vcpu = vm.create_vcpu(0).map_err(ioctl("create a vCPU"))?;
        vcpu.set_cpuid2(&cpuid).map_err(ioctl("set CPU features"))?;
        let mut sregs = vcpu.get_sregs().map_err(ioctl("read CPU state"))?;
        long_mode(&mut sregs);
        vcpu.set_sregs(&sregs).map_err(ioctl("enter 64-bit mode"))?;
        let regs = kvm_regs {
            rbx: COUNT,
            rip: CODE,
            rflags: RFLAGS_RESERVED,
            ..Default::default()
        };
        vcpu.set_regs(&regs).map_err(ioctl("set registers"))?;
        Ok(Self {
            vcpu,
            _vm: vm,
            memory,
            nesting: offers_nesting(&cpuid),
        })
    }

    /// Whether KVM offers hardware virtualisation to its guests.
    pub fn nesting(&self) -> bool {
        self.nesting
    }

    /// Lets the guest count down from `count`, which is at least 1. Returns when the guest is done.
    pub fn count_down(&mut self, count: u32) -> Result<(), GuestError> {
        self.memory
            .write_obj(count, GuestAddress(COUNT))
            .map_err(|_| GuestError::Memory)?;
        match self.vcpu.run() {
            Ok(VcpuExit::IoOut(port, _)) if port == u16::from(DONE_PORT) => Ok(()),
            Ok(exit) => Err(GuestError::Exit {
                exit: format!("{exit:?}"),
            }),
            Err(error) => Err(GuestError::Ioctl {
                step: "run the vCPU",
                errno: error.errno(),
            }),
        }
    }
}

/// KVM lists VMX or SVM among the features for guests only while nesting is on.
fn offers_nesting(cpuid: &CpuId) -> bool {
    cpuid.as_slice().iter().any(|entry| match entry.function {
        0x1 => entry.ecx & VMX_BIT != 0,
        0x8000_0001 => entry.ecx & SVM_BIT != 0,
        _ => false,
    })
}

/// `start: mov ecx, [rbx]; again: dec ecx; jnz again; out DONE_PORT, al; jmp start`
const PROGRAM: [u8; 10] = [
    0x8b, 0x0b, 0xff, 0xc9, 0x75, 0xfc, 0xe6, DONE_PORT, 0xeb, 0xf6,
];

/// Identity-maps the first 2 MiB and places the program.
fn write_guest(memory: &GuestMemoryMmap) -> Result<(), vm_memory::GuestMemoryError> {
    memory.write_obj(PDPT | PRESENT_WRITABLE, GuestAddress(PML4))?;
    memory.write_obj(PD | PRESENT_WRITABLE, GuestAddress(PDPT))?;
    memory.write_obj(PRESENT_WRITABLE | LARGE_PAGE, GuestAddress(PD))?;
    memory.write_slice(&PROGRAM, GuestAddress(CODE))
}

pub(crate) fn long_mode(sregs: &mut kvm_sregs) {
    let flat = kvm_segment {
        base: 0,
        limit: u32::MAX,
        present: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    sregs.cs = kvm_segment {
        selector: 0x08,
        type_: 0b1011,
        l: 1,
        ..flat
    };
    let data = kvm_segment {
        selector: 0x10,
        type_: 0b0011,
        db: 1,
        ..flat
    };
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.cr3 = PML4;
    sregs.cr4 = CR4_PAE;
    sregs.cr0 = CR0_PE_MP_ET_NE_WP_AM_PG;
    sregs.efer = EFER_LME_LMA;
}

extern "C" fn on_interrupt(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Makes `KVM_RUN` of a thread return, with a signal whose handler does nothing.
pub fn interrupt(thread: libc::pthread_t) -> Result<(), ()> {
    // From the middle of the range: other code tends to use the lowest real-time signals.
    let signal = SIGRTMIN() + 9;
    register_signal_handler(signal, on_interrupt).map_err(|_| ())?;
    // SAFETY: the thread has not been joined, so its id is valid; the handler is in place, so the
    // signal cannot end the process.
    match unsafe { libc::pthread_kill(thread, signal) } {
        0 => Ok(()),
        _ => Err(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_jumps_back_to_its_start() {
        let distance = i64::from(PROGRAM[PROGRAM.len() - 1] as i8);
        assert_eq!(PROGRAM.len() as i64 + distance, 0);
    }

    #[test]
    fn nesting_is_read_from_either_vendor() {
        let with = |function, ecx| {
            let entry = kvm_bindings::kvm_cpuid_entry2 {
                function,
                ecx,
                ..Default::default()
            };
            offers_nesting(&CpuId::from_entries(&[entry]).unwrap())
        };
        assert!(with(0x1, VMX_BIT));
        assert!(with(0x8000_0001, SVM_BIT));
        assert!(!with(0x1, SVM_BIT));
        assert!(!with(0x7, u32::MAX));
    }
}
