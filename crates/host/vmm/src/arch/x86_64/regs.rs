//! The registers that a CPU starts with: flat segments, and page tables for a 64-bit start.

use forkd_memory::GuestMemory;
use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress};

use super::kernel::Entry;
use super::layout;

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
const PAGE_PRESENT_WRITABLE: u64 = 0x3;
const PAGE_LARGE: u64 = 0x80;
const RFLAGS_RESERVED: u64 = 2;

/// The boot structures cannot be written.
#[derive(Debug, Error)]
#[error("cannot write the boot structures")]
pub struct BootStructures(#[source] vm_memory::GuestMemoryError);

/// One entry of the descriptor table and the segment register it fills.
#[derive(Debug, Clone, Copy)]
struct Descriptor {
    flags: u16,
    limit: u32,
}

const NULL: Descriptor = Descriptor { flags: 0, limit: 0 };
const CODE_64: Descriptor = Descriptor {
    flags: 0xa09b,
    limit: 0xf_ffff,
};
const CODE_32: Descriptor = Descriptor {
    flags: 0xc09b,
    limit: 0xf_ffff,
};
const DATA: Descriptor = Descriptor {
    flags: 0xc093,
    limit: 0xf_ffff,
};
const TASK: Descriptor = Descriptor {
    flags: 0x008b,
    limit: 0x67,
};

impl Descriptor {
    fn entry(self) -> u64 {
        let (flags, limit) = (u64::from(self.flags), u64::from(self.limit));
        (flags & 0xf0ff) << 40 | (limit & 0xf_0000) << 32 | (limit & 0xffff)
    }

    fn segment(self, index: u16) -> kvm_segment {
        let bit = |n: u16| ((self.flags >> n) & 1) as u8;
        let granular = bit(15);
        kvm_segment {
            base: 0,
            limit: if granular == 1 {
                (self.limit << 12) | 0xfff
            } else {
                self.limit
            },
            selector: index * 8,
            type_: (self.flags & 0xf) as u8,
            present: bit(7),
            dpl: ((self.flags >> 5) & 3) as u8,
            db: bit(14),
            s: bit(4),
            l: bit(13),
            g: granular,
            avl: bit(12),
            unusable: 0,
            padding: 0,
        }
    }
}

/// Sets the boot CPU's special registers and writes what they point to.
pub fn set_up_sregs(
    memory: &GuestMemory,
    entry: Entry,
    sregs: &mut kvm_sregs,
) -> Result<(), BootStructures> {
    let code = match entry {
        Entry::Pvh { .. } => CODE_32,
        Entry::Linux64 { .. } => CODE_64,
    };
    let table = [NULL, code, DATA, TASK];
    for (address, descriptor) in (layout::GDT..).step_by(8).zip(table) {
        memory
            .write_obj(descriptor.entry(), GuestAddress(address))
            .map_err(BootStructures)?;
    }
    sregs.gdt.base = layout::GDT;
    sregs.gdt.limit = (table.len() * 8 - 1) as u16;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    let data = DATA.segment(2);
    sregs.cs = code.segment(1);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = TASK.segment(3);
    match entry {
        Entry::Pvh { .. } => {
            sregs.cr0 = CR0_PE | CR0_ET;
            sregs.cr4 = 0;
        }
        Entry::Linux64 { .. } => {
            write_page_tables(memory).map_err(BootStructures)?;
            sregs.cr3 = layout::PAGE_TABLES;
            sregs.cr4 |= CR4_PAE;
            sregs.cr0 |= CR0_PE | CR0_ET | CR0_PG;
            sregs.efer |= EFER_LME | EFER_LMA;
        }
    }
    Ok(())
}

/// The first GiB, mapped one to one with large pages.
fn write_page_tables(memory: &GuestMemory) -> Result<(), vm_memory::GuestMemoryError> {
    let (top, middle, low) = (
        layout::PAGE_TABLES,
        layout::PAGE_TABLES + 0x1000,
        layout::PAGE_TABLES + 0x2000,
    );
    memory.write_obj(middle | PAGE_PRESENT_WRITABLE, GuestAddress(top))?;
    memory.write_obj(low | PAGE_PRESENT_WRITABLE, GuestAddress(middle))?;
    for n in 0..512u64 {
        let entry = (n << 21) | PAGE_LARGE | PAGE_PRESENT_WRITABLE;
        memory.write_obj(entry, GuestAddress(low + n * 8))?;
    }
    Ok(())
}

/// The boot CPU's general registers.
pub fn boot_regs(entry: Entry) -> kvm_regs {
    let base = kvm_regs {
        rflags: RFLAGS_RESERVED,
        rsp: layout::BOOT_STACK,
        rbp: layout::BOOT_STACK,
        ..kvm_regs::default()
    };
    match entry {
        Entry::Pvh { address } => kvm_regs {
            rip: address,
            rbx: layout::PVH_INFO,
            ..base
        },
        Entry::Linux64 { address } => kvm_regs {
            rip: address,
            rsi: layout::ZERO_PAGE,
            ..base
        },
    }
}

#[cfg(test)]
mod tests {
    use forkd_memory::{GuestRam, RamLayout};

    use super::*;

    #[test]
    fn descriptors_are_what_the_manual_says() {
        assert_eq!(CODE_64.entry(), 0x00af_9b00_0000_ffff);
        assert_eq!(CODE_32.entry(), 0x00cf_9b00_0000_ffff);
        assert_eq!(DATA.entry(), 0x00cf_9300_0000_ffff);
        assert_eq!(TASK.entry(), 0x0000_8b00_0000_0067);
        assert_eq!(CODE_64.segment(1).limit, u32::MAX);
        assert_eq!(CODE_64.segment(1).l, 1);
        assert_eq!(CODE_32.segment(1).l, 0);
    }

    #[test]
    fn a_pvh_start_has_no_paging_and_a_linux_start_has() {
        let ram = GuestRam::reserve(RamLayout::new(64).unwrap()).unwrap();
        ram.map_zero().unwrap();
        let mut sregs = kvm_sregs::default();
        set_up_sregs(ram.memory(), Entry::Pvh { address: 1 }, &mut sregs).unwrap();
        assert_eq!(sregs.cr0 & CR0_PG, 0);
        let mut sregs = kvm_sregs::default();
        set_up_sregs(ram.memory(), Entry::Linux64 { address: 1 }, &mut sregs).unwrap();
        assert_ne!(sregs.cr0 & CR0_PG, 0);
        let entry: u64 = ram.memory().read_obj(GuestAddress(0x3000 + 8)).unwrap();
        assert_eq!(entry, 0x20_0083);
    }
}
