//! A running machine is cut and goes on; what starts from the cut is of one piece.

use std::time::Duration;

use anyhow::{Context, ensure};
use forkd_guest_proto::ProcessState;
use forkd_testkit::{BootOptions, Kit, Vm};

use super::load::check_chain;
use crate::scenario::{Run, times};

const CHAIN: &str = "/root/chain";

pub async fn consistent_under_load(run: Run) -> anyhow::Result<()> {
    let kit = &run.kit;
    let options = BootOptions {
        vcpus: 2,
        ..Default::default()
    };
    let source = kit.boot(options).await?;
    source.put_self().await?;
    let load = source
        .agent()
        .await?
        .start(source.guest_half("load", &[CHAIN]))
        .await?;
    let mut pauses = Vec::new();
    let mut count = 0;
    for number in 0..times(2, 200) {
        count = advances(&source, count).await?;
        let cut = source.branch().await?;
        pauses.push(cut.report.pause_us);
        let child = kit.fork_named(&cut, &format!("branch-{number}")).await?;
        // The child goes on from the instant of the cut, the source as if nothing had happened.
        for vm in [&child, &source] {
            advances(vm, count).await?;
            runs_on(vm, load.process).await?;
        }
        apart(&child, &source, number).await?;
    }
    let text = source.sh(&format!("cat {CHAIN}")).await?;
    let last = check_chain(&text)?;
    pauses.sort_unstable();
    eprintln!(
        "{} branches under load, {last} rounds; pauses of {:?} to {:?} us",
        pauses.len(),
        pauses.first(),
        pauses.last()
    );
    recovers_from_a_bad_cut(kit, &source, load.process).await
}

/// Waits until the chain is longer than it was, and checks all of it.
async fn advances(vm: &Vm, from: u64) -> anyhow::Result<u64> {
    let coming = async {
        loop {
            let text = vm
                .sh(&format!("cat {CHAIN} 2>/dev/null || true; echo"))
                .await?;
            let now = check_chain(&text)?;
            if now > from {
                return anyhow::Ok(now);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), coming)
        .await
        .context("the load does not go on")?
}

async fn runs_on(vm: &Vm, process: u64) -> anyhow::Result<()> {
    let processes = vm.agent().await?.processes().await?;
    let info = processes.iter().find(|info| info.process == process);
    let info = info.context("the load is not listed")?;
    ensure!(info.state == ProcessState::Running, "{info:?}");
    let complaints = vm
        .sh("dmesg | grep -c -i -e 'i/o error' -e 'ext4-fs error' -e 'bug:' || true")
        .await?;
    ensure!(complaints == "0", "{complaints} complaints of the kernel");
    Ok(())
}

/// What one writes after the cut, the other does not have.
async fn apart(child: &Vm, source: &Vm, number: usize) -> anyhow::Result<()> {
    child
        .sh(&format!("echo child > /root/side-{number}; sync"))
        .await?;
    let seen = source
        .sh(&format!("cat /root/side-{number} 2>/dev/null || echo none"))
        .await?;
    ensure!(seen == "none", "the source has the child's file");
    source
        .sh(&format!("echo source > /root/side-{number}; sync"))
        .await?;
    let seen = child.sh(&format!("cat /root/side-{number}")).await?;
    ensure!(seen == "child", "the child has {seen:?}");
    Ok(())
}

/// A cut that cannot be written leaves the source running.
async fn recovers_from_a_bad_cut(kit: &Kit, source: &Vm, process: u64) -> anyhow::Result<()> {
    let before = advances(source, 0).await?;
    ensure!(
        source.branch_to_full_disk().await.is_err(),
        "a cut to a full disk worked"
    );
    advances(source, before).await?;
    runs_on(source, process).await?;
    let cut = source.branch().await?;
    let child = kit.fork_named(&cut, "after-a-bad-cut").await?;
    advances(&child, before).await?;
    Ok(())
}
