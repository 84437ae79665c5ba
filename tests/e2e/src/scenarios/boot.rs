//! The stock kernel boots until the agent has answered.

use anyhow::ensure;
use forkd_testkit::BootOptions;

use crate::scenario::Run;

pub async fn one_vcpu(run: Run) -> anyhow::Result<()> {
    answers_with(run, BootOptions::default()).await
}

pub async fn two_vcpus(run: Run) -> anyhow::Result<()> {
    answers_with(
        run,
        BootOptions {
            vcpus: 2,
            ..Default::default()
        },
    )
    .await
}

pub async fn four_vcpus(run: Run) -> anyhow::Result<()> {
    answers_with(
        run,
        BootOptions {
            vcpus: 4,
            ..Default::default()
        },
    )
    .await
}

pub async fn compressed_kernel(run: Run) -> anyhow::Result<()> {
    let kernel = Some(run.kit.assets.bzimage.clone());
    answers_with(
        run,
        BootOptions {
            kernel,
            ..Default::default()
        },
    )
    .await
}

async fn answers_with(run: Run, options: BootOptions) -> anyhow::Result<()> {
    let vcpus = options.vcpus;
    let vm = run.kit.boot(options).await?;
    let counted = vm.sh("nproc").await?;
    ensure!(
        counted.trim() == vcpus.to_string(),
        "the guest counts {counted} vCPUs"
    );
    Ok(())
}
