//! A stock kernel boots until its agent has answered: several vCPU counts, kernel formats and memory sizes.

use anyhow::ensure;
use forkd_testkit::{BootOptions, Kit, Root};
use forkd_types::MiB;
use forkd_vmm_proto::CpuModel;

use crate::scenario::{Registered, Run, everyday};

pub const SCENARIOS: &[Registered] = &[
    everyday!(one_vcpu),
    everyday!(two_vcpus_and_the_portable_cpu),
    everyday!(compressed_kernel_and_no_disk),
    everyday!(memory_on_both_sides_of_the_hole),
];

pub async fn one_vcpu(run: Run) -> anyhow::Result<()> {
    answers_with(&run.kit, BootOptions::default()).await
}

pub async fn two_vcpus_and_the_portable_cpu(run: Run) -> anyhow::Result<()> {
    let options = BootOptions {
        vcpus: 2,
        cpu: CpuModel::Baseline,
        ..Default::default()
    };
    answers_with(&run.kit, options).await
}

pub async fn compressed_kernel_and_no_disk(run: Run) -> anyhow::Result<()> {
    let options = BootOptions {
        kernel: Some(run.kit.assets.bzimage.clone()),
        root: Root::None,
        memory: MiB(128),
        ..Default::default()
    };
    let vm = run.kit.boot(options).await?;
    let agent = vm.agent().await?;
    let pong = agent.ping().await?;
    ensure!(pong.pid == 1, "the agent is process {}, not 1", pong.pid);
    ensure!(
        agent.metrics().await?.cpu.count == 1,
        "another number of vCPUs"
    );
    Ok(())
}

/// More memory than fits below the device hole.
pub async fn memory_on_both_sides_of_the_hole(run: Run) -> anyhow::Result<()> {
    let options = BootOptions {
        memory: MiB(4096),
        root: Root::None,
        ..Default::default()
    };
    let vm = run.kit.boot(options).await?;
    let total = vm.agent().await?.metrics().await?.memory.total_kib;
    ensure!(total > 3900 * 1024, "the guest sees {total} KiB of memory");
    Ok(())
}

async fn answers_with(kit: &Kit, options: BootOptions) -> anyhow::Result<()> {
    let vcpus = options.vcpus;
    let vm = kit.boot(options).await?;
    let counted = vm.sh("nproc").await?;
    ensure!(
        counted == vcpus.to_string(),
        "the guest counts {counted} vCPUs"
    );
    let pong = vm.agent().await?.ping().await?;
    ensure!(pong.pid == 1, "the agent is process {}, not 1", pong.pid);
    Ok(())
}
