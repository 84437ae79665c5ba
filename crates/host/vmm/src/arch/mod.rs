//! Code that depends on the processor architecture; x86-64 is the only one.

#[cfg(target_arch = "x86_64")]
pub mod x86_64;

#[cfg(target_arch = "x86_64")]
pub use x86_64 as current;
