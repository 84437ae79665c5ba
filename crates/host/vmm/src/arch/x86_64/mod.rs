//! x86-64: where things lie, what the firmware tables say, how a CPU starts.

pub mod acpi;
pub mod bios;
pub mod cpu_check;
pub mod cpuid;
pub mod kernel;
pub mod layout;
pub mod msr;
pub mod regs;
mod shared_file;
