//! x86-64: the address layout, firmware tables, CPUID and registers, and kernel loading.
//!
//! [`layout`] is the contract with snapshots: a machine with another layout refuses their state.

pub mod acpi;
pub mod bios;
pub mod cpu_check;
pub mod cpuid;
pub mod kernel;
pub mod layout;
pub mod msr;
pub mod regs;
mod shared_file;
