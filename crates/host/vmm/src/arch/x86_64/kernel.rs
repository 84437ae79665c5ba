//! Loading a kernel: ELF or bzImage, initramfs, command line and boot structures.
//!
//! The kernel starts by PVH if the image has the note, and by the 64-bit Linux protocol otherwise. Kernel and
//! initramfs come from users, so every offset and length is checked.

use std::fs::File;
use std::io::Read;

use super::shared_file::SharedFile;
use forkd_memory::{GuestMemory, LOW_RAM_END, PAGE_SIZE, RamLayout};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use linux_loader::loader::bzimage::BzImage;
use linux_loader::loader::elf::{
    Elf, PvhBootCapability,
    start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info},
};
use linux_loader::loader::{KernelLoader, KernelLoaderResult};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress};

use super::bios::{MemoryRange, RangeKind, memory_map};
use super::layout;

const BOOT_FLAG: u16 = 0xaa55;
const HDRS: u32 = 0x5372_6448;
const LOADER_UNKNOWN: u8 = 0xff;
const KERNEL_64_BIT: u16 = 1;
const BZIMAGE_64_BIT_ENTRY: u64 = 0x200;
const PVH_MAGIC: u32 = 0x336e_c578;
const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

/// How the boot CPU enters the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// In 32-bit protected mode, by the PVH protocol.
    Pvh { address: u64 },
    /// In 64-bit mode, by the Linux boot protocol.
    Linux64 { address: u64 },
}

/// Why a kernel cannot be started.
#[derive(Debug, Error)]
pub enum KernelError {
    /// The file cannot be read.
    #[error("cannot read the kernel image")]
    Read(#[source] std::io::Error),
    /// Neither an ELF file nor a bzImage.
    #[error("the kernel is neither an ELF file nor a bzImage")]
    Unknown,
    /// The image is one of them, but damaged or too large for the VM.
    #[error("the kernel image is damaged or larger than the guest's memory")]
    Load(#[source] linux_loader::loader::Error),
    /// A bzImage from before 64-bit entry points.
    #[error("the bzImage has no 64-bit entry point")]
    No64Bit,
    /// The command line is too long or not ASCII.
    #[error(
        "the kernel command line is longer than {limit} bytes or has a character that is not printable ASCII"
    )]
    Cmdline { limit: usize },
    /// The initial RAM disk cannot be read.
    #[error("cannot read the initial RAM disk")]
    Initramfs(#[source] vm_memory::GuestMemoryError),
    /// The initial RAM disk cannot be measured.
    #[error("cannot measure the initial RAM disk")]
    InitramfsSize(#[source] std::io::Error),
    /// Kernel and initial RAM disk are too large for memory.
    #[error("an initial RAM disk of {size} bytes does not fit beside the kernel")]
    NoRoom { size: u64 },
    /// Guest memory cannot be written.
    #[error("cannot write the start information")]
    Write(#[source] vm_memory::GuestMemoryError),
}

/// The files and the command line of a boot.
pub struct KernelFiles {
    /// ELF or bzImage.
    pub kernel: File,
    /// Initial RAM disk.
    pub initramfs: Option<File>,
    pub cmdline: String,
}

#[derive(Debug, Clone, Copy, Default)]
struct Initramfs {
    address: u64,
    size: u64,
}

/// Loads kernel, initramfs and command line, and returns the entry point.
pub fn load(
    memory: &GuestMemory,
    ram: RamLayout,
    rsdp: u64,
    files: KernelFiles,
) -> Result<Entry, KernelError> {
    write_cmdline(memory, &files.cmdline)?;
    let (loaded, entry) = load_kernel(memory, &files.kernel)?;
    let initramfs = match files.initramfs {
        Some(file) => load_initramfs(memory, ram, &file, &loaded)?,
        None => Initramfs::default(),
    };
    let map = memory_map(ram);
    match entry {
        Entry::Pvh { .. } => write_pvh(memory, initramfs, rsdp, &map),
        Entry::Linux64 { .. } => write_zero_page(
            memory,
            initramfs,
            rsdp,
            &map,
            loaded.setup_header,
            &files.cmdline,
        ),
    }
    .map_err(KernelError::Write)?;
    Ok(entry)
}

fn write_cmdline(memory: &GuestMemory, cmdline: &str) -> Result<(), KernelError> {
    let limit = layout::CMDLINE_MAX - 1;
    if cmdline.len() > limit || cmdline.bytes().any(|b| !(b' '..=b'~').contains(&b)) {
        return Err(KernelError::Cmdline { limit });
    }
    memory
        .write_slice(cmdline.as_bytes(), GuestAddress(layout::CMDLINE))
        .and_then(|()| {
            let end = layout::CMDLINE + cmdline.len() as u64;
            memory.write_obj(0u8, GuestAddress(end))
        })
        .map_err(KernelError::Write)
}

fn load_kernel(
    memory: &GuestMemory,
    file: &File,
) -> Result<(KernelLoaderResult, Entry), KernelError> {
    let file = &mut SharedFile::new(file).map_err(KernelError::Read)?;
    let mut head = [0u8; 0x206];
    let got = read_up_to(file, &mut head).map_err(KernelError::Read)?;
    let head = head.get(..got).unwrap_or_default();
    let lowest = Some(GuestAddress(layout::HIGH_MEMORY));
    if head.starts_with(b"\x7fELF") {
        let loaded = Elf::load(memory, None, file, lowest).map_err(KernelError::Load)?;
        let entry = match loaded.pvh_boot_cap {
            PvhBootCapability::PvhEntryPresent(address) => Entry::Pvh { address: address.0 },
            PvhBootCapability::PvhEntryNotPresent | PvhBootCapability::PvhEntryIgnored => {
                Entry::Linux64 {
                    address: loaded.kernel_load.0,
                }
            }
        };
        return Ok((loaded, entry));
    }
    if head.get(0x202..0x206) == Some(b"HdrS") {
        let loaded = BzImage::load(memory, None, file, lowest).map_err(KernelError::Load)?;
        let has_64_bit = loaded
            .setup_header
            .is_some_and(|h| h.version >= 0x20c && h.xloadflags & KERNEL_64_BIT != 0);
        if !has_64_bit {
            return Err(KernelError::No64Bit);
        }
        let address = loaded.kernel_load.0 + BZIMAGE_64_BIT_ENTRY;
        return Ok((loaded, Entry::Linux64 { address }));
    }
    Err(KernelError::Unknown)
}

fn read_up_to(file: &mut impl Read, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match file.read(&mut buffer[got..])? {
            0 => break,
            n => got += n,
        }
    }
    Ok(got)
}

/// Puts the initramfs at the top of low RAM, above the memory that the kernel needs.
fn load_initramfs(
    memory: &GuestMemory,
    ram: RamLayout,
    file: &File,
    kernel: &KernelLoaderResult,
) -> Result<Initramfs, KernelError> {
    let mut file = SharedFile::new(file).map_err(KernelError::InitramfsSize)?;
    let size = file.size;
    let top = match kernel.setup_header {
        Some(header) => u64::from(header.initrd_addr_max).saturating_add(1),
        None => LOW_RAM_END,
    };
    let top = ram.bytes().min(LOW_RAM_END).min(top);
    let kernel_end = match kernel.setup_header {
        Some(header) => header
            .pref_address
            .max(kernel.kernel_load.0)
            .saturating_add(u64::from(header.init_size)),
        None => kernel.kernel_end,
    };
    let address = top
        .checked_sub(size)
        .map(|address| address & !(PAGE_SIZE - 1))
        .filter(|&address| address >= kernel_end)
        .ok_or(KernelError::NoRoom { size })?;
    let mut read = 0;
    while read < size {
        let want = (size - read).min(16 << 20) as usize;
        memory
            .read_exact_volatile_from(GuestAddress(address + read), &mut file, want)
            .map_err(KernelError::Initramfs)?;
        read += want as u64;
    }
    Ok(Initramfs { address, size })
}

fn write_pvh(
    memory: &GuestMemory,
    initramfs: Initramfs,
    rsdp: u64,
    map: &[MemoryRange],
) -> Result<(), vm_memory::GuestMemoryError> {
    let modules = layout::PVH_INFO + size_of::<hvm_start_info>() as u64;
    let has_initramfs = initramfs.size > 0;
    let info = hvm_start_info {
        magic: PVH_MAGIC,
        version: 1,
        nr_modules: u32::from(has_initramfs),
        modlist_paddr: if has_initramfs { modules } else { 0 },
        cmdline_paddr: layout::CMDLINE,
        rsdp_paddr: rsdp,
        memmap_paddr: layout::PVH_MEMMAP,
        memmap_entries: map.len() as u32,
        ..hvm_start_info::default()
    };
    memory.write_obj(info, GuestAddress(layout::PVH_INFO))?;
    let module = hvm_modlist_entry {
        paddr: initramfs.address,
        size: initramfs.size,
        ..hvm_modlist_entry::default()
    };
    memory.write_obj(module, GuestAddress(modules))?;
    for (n, range) in map.iter().enumerate() {
        let entry = hvm_memmap_table_entry {
            addr: range.start,
            size: range.len,
            type_: e820_type(range.kind),
            reserved: 0,
        };
        let address = layout::PVH_MEMMAP + (n * size_of::<hvm_memmap_table_entry>()) as u64;
        memory.write_obj(entry, GuestAddress(address))?;
    }
    Ok(())
}

fn e820_type(kind: RangeKind) -> u32 {
    match kind {
        RangeKind::Ram => E820_RAM,
        RangeKind::Reserved => E820_RESERVED,
    }
}

fn write_zero_page(
    memory: &GuestMemory,
    initramfs: Initramfs,
    rsdp: u64,
    map: &[MemoryRange],
    header: Option<setup_header>,
    cmdline: &str,
) -> Result<(), vm_memory::GuestMemoryError> {
    let mut params = boot_params {
        hdr: header.unwrap_or_default(),
        ..boot_params::default()
    };
    params.hdr.boot_flag = BOOT_FLAG;
    params.hdr.header = HDRS;
    params.hdr.type_of_loader = LOADER_UNKNOWN;
    params.hdr.cmd_line_ptr = layout::CMDLINE as u32;
    params.hdr.cmdline_size = cmdline.len() as u32;
    params.hdr.kernel_alignment = params.hdr.kernel_alignment.max(0x0100_0000);
    // Low RAM ends at 3 GiB, so both fit.
    params.hdr.ramdisk_image = initramfs.address as u32;
    params.hdr.ramdisk_size = initramfs.size as u32;
    params.acpi_rsdp_addr = rsdp;
    for (slot, range) in params.e820_table.iter_mut().zip(map) {
        *slot = boot_e820_entry {
            addr: range.start,
            size: range.len,
            r#type: e820_type(range.kind),
        };
    }
    params.e820_entries = map.len() as u8;
    memory.write_obj(params, GuestAddress(layout::ZERO_PAGE))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use forkd_memory::GuestRam;
    use forkd_vmm_driver::tiny;

    use super::*;

    fn ram() -> GuestRam {
        let ram = GuestRam::reserve(RamLayout::new(64).unwrap()).unwrap();
        ram.map_zero().unwrap();
        ram
    }

    fn file(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn load_bytes(
        kernel: &[u8],
        cmdline: &str,
        initramfs: Option<&[u8]>,
    ) -> Result<Entry, KernelError> {
        let ram = ram();
        load(
            ram.memory(),
            ram.layout(),
            layout::ACPI_TABLES,
            KernelFiles {
                kernel: file(kernel),
                initramfs: initramfs.map(file),
                cmdline: cmdline.to_owned(),
            },
        )
    }

    #[test]
    fn an_elf_file_starts_at_its_entry() {
        let entry = load_bytes(&tiny::image(), "quiet", None).unwrap();
        assert_eq!(
            entry,
            Entry::Linux64 {
                address: tiny::ENTRY
            }
        );
    }

    #[test]
    fn what_is_no_kernel_is_refused() {
        for bytes in [&b""[..], b"#!/bin/sh", &[0; 4096], b"\x7fELF"] {
            assert!(load_bytes(bytes, "", None).is_err());
        }
    }

    #[test]
    fn a_bad_command_line_is_refused() {
        for cmdline in ["x".repeat(layout::CMDLINE_MAX), "a\nb".into(), "é".into()] {
            assert!(matches!(
                load_bytes(&tiny::image(), &cmdline, None),
                Err(KernelError::Cmdline { .. })
            ));
        }
    }

    #[test]
    fn a_ram_disk_larger_than_memory_is_refused() {
        let big = vec![1; 65 << 20];
        assert!(matches!(
            load_bytes(&tiny::image(), "", Some(&big)),
            Err(KernelError::NoRoom { .. })
        ));
        assert!(load_bytes(&tiny::image(), "", Some(&vec![1; 5_000_001])).is_ok());
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]
        #[test]
        fn a_damaged_elf_file_never_panics(
            at in 0usize..200,
            bytes in proptest::collection::vec(proptest::num::u8::ANY, 1..16),
        ) {
            let mut image = tiny::image();
            for (offset, byte) in (at..).zip(bytes) {
                if let Some(place) = image.get_mut(offset) {
                    *place = byte;
                }
            }
            let _ = load_bytes(&image, "", None);
        }
    }
}
