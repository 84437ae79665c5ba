//! The memory that a VMM needs beside guest memory.

use anyhow::ensure;
use forkd_testkit::{BootOptions, procfs};
use forkd_types::MiB;

use crate::scenario::{Registered, Run, everyday};

pub const SCENARIOS: &[Registered] = &[everyday!(memory_of_the_vmm)];

/// The promised bound for one vCPU and 128 MiB, in KiB.
const MOST: u64 = 5 * 1024;

pub async fn memory_of_the_vmm(run: Run) -> anyhow::Result<()> {
    let options = BootOptions {
        memory: MiB(128),
        ..Default::default()
    };
    let vm = run.kit.boot(options).await?;
    vm.sh("true").await?;
    let memory = procfs::memory(vm.pid())?;
    eprintln!(
        "VMM: {} KiB besides {} KiB of guest memory",
        memory.own_pss, memory.guest_pss
    );
    ensure!(
        memory.guest_pss > 20 * 1024,
        "no guest memory found: {memory:?}"
    );
    ensure!(memory.own_pss < MOST, "{memory:?}");
    Ok(())
}
