//! The program `forkd-vmm`.
fn main() {}
