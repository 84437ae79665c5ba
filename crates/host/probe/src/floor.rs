//! The least that a fork can cost on this host: the bare system calls, with nothing of ours around them.
//!
//! A [`FloorShell`] is a VM with a memory slot over reserved address space and one vCPU. Forking maps an
//! image over the range, sets the registers and runs to the first port write. The benchmark of the
//! product's own fork path is given as a ratio to this, measured in the same run.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr::{self, NonNull};

use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_regs,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use crate::guest::{GuestError, RFLAGS_RESERVED, ioctl, long_mode};

/// Address of the tiny guest's page tables.
pub const TINY_TABLES: u64 = 0x9000;
/// Entry point of the tiny guest.
pub const TINY_ENTRY: u64 = 0x10_0000;
/// The port of the first serial line.
pub const TINY_PORT: u16 = 0x3f8;
/// The byte that the tiny guest writes to the port.
pub const TINY_BYTE: u8 = b'!';

/// `mov dx, TINY_PORT; mov al, TINY_BYTE; out dx, al; again: hlt; jmp again`
const PROGRAM: [u8; 10] = [
    0x66, 0xba, 0xf8, 0x03, 0xb0, TINY_BYTE, 0xee, 0xf4, 0xeb, 0xfd,
];

const PRESENT_WRITABLE: u64 = 0b11;
const LARGE_PAGE: u64 = 1 << 7;

/// Makes `file` the memory image of the tiny guest: sparse, `bytes` long, with identity-mapped page tables
/// for the first GiB and the program.
pub fn write_tiny_image(file: &File, bytes: u64) -> io::Result<()> {
    file.set_len(bytes)?;
    let (pdpt, pd) = (TINY_TABLES + 0x1000, TINY_TABLES + 0x2000);
    file.write_all_at(&(pdpt | PRESENT_WRITABLE).to_le_bytes(), TINY_TABLES)?;
    file.write_all_at(&(pd | PRESENT_WRITABLE).to_le_bytes(), pdpt)?;
    let entries: Vec<u8> = (0..512u64)
        .flat_map(|n| (n << 21 | PRESENT_WRITABLE | LARGE_PAGE).to_le_bytes())
        .collect();
    file.write_all_at(&entries, pd)?;
    file.write_all_at(&PROGRAM, TINY_ENTRY)
}

/// A VM without memory. Fields drop in order: the VM before the range that its slot refers to.
#[derive(Debug)]
pub struct FloorShell {
    vcpu: VcpuFd,
    _vm: VmFd,
    memory: Reserved,
}

impl FloorShell {
    /// Creates the VM, its memory slot over a reserved range, and its vCPU.
    pub fn create(bytes: usize) -> Result<Self, GuestError> {
        let device = CString::new(crate::DEVICE).map_err(|_| GuestError::Memory)?;
        let kvm = Kvm::new_with_path(device.as_c_str()).map_err(|error| GuestError::Open {
            errno: error.errno(),
        })?;
        let cpuid = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(ioctl("read the supported CPU features"))?;
        let vm = kvm.create_vm().map_err(ioctl("create a VM"))?;
        vm.create_irq_chip()
            .map_err(ioctl("create interrupt controllers"))?;
        let pit = kvm_pit_config {
            flags: KVM_PIT_SPEAKER_DUMMY,
            ..Default::default()
        };
        vm.create_pit2(pit).map_err(ioctl("create a timer"))?;
        let memory = Reserved::new(bytes).ok_or(GuestError::Memory)?;
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: bytes as u64,
            userspace_addr: memory.start.as_ptr() as u64,
        };
        // SAFETY: the region is the range owned by `memory`, which drops after the VM.
        unsafe { vm.set_user_memory_region(region) }.map_err(ioctl("give the VM memory"))?;
        let vcpu = vm.create_vcpu(0).map_err(ioctl("create a vCPU"))?;
        vcpu.set_cpuid2(&cpuid).map_err(ioctl("set CPU features"))?;
        Ok(Self {
            vcpu,
            _vm: vm,
            memory,
        })
    }

    /// Maps the image, sets the registers, and runs the guest until it has written its byte.
    pub fn fork(&mut self, image: &File) -> Result<(), GuestError> {
        self.memory.map(image).map_err(|_| GuestError::Memory)?;
        let mut sregs = self.vcpu.get_sregs().map_err(ioctl("read CPU state"))?;
        long_mode(&mut sregs);
        sregs.cr3 = TINY_TABLES;
        self.vcpu
            .set_sregs(&sregs)
            .map_err(ioctl("enter 64-bit mode"))?;
        let regs = kvm_regs {
            rip: TINY_ENTRY,
            rflags: RFLAGS_RESERVED,
            ..Default::default()
        };
        self.vcpu.set_regs(&regs).map_err(ioctl("set registers"))?;
        match self.vcpu.run() {
            Ok(VcpuExit::IoOut(TINY_PORT, &[TINY_BYTE])) => Ok(()),
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

/// A reserved address range.
#[derive(Debug)]
struct Reserved {
    start: NonNull<libc::c_void>,
    bytes: usize,
}

impl Reserved {
    fn new(bytes: usize) -> Option<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        NonNull::new(start).map(|start| Self { start, bytes })
    }

    fn map(&self, image: &File) -> io::Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range is ours alone and no reference into it exists: only the guest reads it.
        let mapped = unsafe {
            libc::mmap(
                self.start.as_ptr(),
                self.bytes,
                access,
                flags,
                image.as_raw_fd(),
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: the range is ours, and the VM that used it has been dropped before.
        unsafe { libc::munmap(self.start.as_ptr(), self.bytes) };
    }
}
