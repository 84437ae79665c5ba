//! Fuzz target for kernel images.
//!
//! The loader must reject or load any bytes, and never panic.

use std::os::unix::fs::FileExt;

use forkd_memory::RamLayout;
use forkd_vmm::arch::x86_64::kernel::{KernelFiles, load};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use crate::devices::memory_file;
use crate::input::Input;

/// Loads a kernel and an initramfs.
pub(crate) fn kernel(data: &[u8]) {
    const MIB: u32 = 64;
    let mut input = Input::new(data);
    let shape = input.u8();
    let initramfs = (shape & 1 == 1).then(|| {
        let file = memory_file();
        let _ = file.set_len(u64::from(input.u32()));
        file
    });
    let cmdline = String::from_utf8_lossy(input.bytes(usize::from(shape >> 4))).into_owned();
    let kernel = memory_file();
    let _ = kernel.write_all_at(input.rest(), 0);
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), (MIB as usize) << 20)]);
    let (Ok(memory), Some(ram)) = (memory, RamLayout::new(MIB)) else {
        return;
    };
    let files = KernelFiles {
        kernel,
        initramfs,
        cmdline,
    };
    let _ = load(&memory, ram, 0, files);
}
