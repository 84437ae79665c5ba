//! A VMM without KVM, in place of `forkd-vmm`.

use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;

use forkd_daemon_tests::fake::{Faults, serve};

fn main() -> anyhow::Result<ExitCode> {
    // A VMM has no environment, so the directory of faults is found by the name this program was started by.
    let program = std::env::args_os().next().unwrap_or_default();
    let faults = Faults::beside(Path::new(&program));
    let control = std::io::stdin().as_fd().try_clone_to_owned()?;
    Ok(ExitCode::from(serve(control, faults)? as u8))
}
