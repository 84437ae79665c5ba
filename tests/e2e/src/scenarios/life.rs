//! Pause, resume and ends of VMs; adoption by a new daemon; no process without an owner.

use std::time::Duration;

use anyhow::{Context, ensure};
use forkd_guest_proto::{ClockRequest, ExecRequest, ShutdownMode, ShutdownRequest};
use forkd_testkit::{BootOptions, Root, Vm, procfs};
use forkd_vmm_proto::spawn::{HowEnded, Jail, Limits};
use forkd_vmm_proto::{Command, ExitCode, Reply, StopCause, VmmPhase};

use crate::scenario::{Registered, Run, everyday};

pub const SCENARIOS: &[Registered] = &[
    everyday!(pause_resume_and_the_power_button),
    everyday!(every_end_has_its_code),
    everyday!(adopted_by_the_next_controller),
    everyday!(no_orphans),
    everyday!(a_killed_id_is_free),
];

const SIGKILL: u8 = 9;

pub async fn pause_resume_and_the_power_button(run: Run) -> anyhow::Result<()> {
    let vm = run.kit.boot(BootOptions::default()).await?;
    let agent = vm.agent().await?;
    agent.ping().await?;
    vm.vmm.run(Command::Pause, &[]).await?;
    ensure!(phase(&vm).await? == VmmPhase::Paused, "not paused");
    let waiting = tokio::time::timeout(Duration::from_secs(1), agent.ping()).await;
    ensure!(waiting.is_err(), "a paused guest answered: {waiting:?}");
    vm.vmm.run(Command::Resume, &[]).await?;
    ensure!(phase(&vm).await? == VmmPhase::Running, "not running");
    agent.ping().await?;
    for _ in 0..20 {
        vm.vmm.run(Command::Pause, &[]).await?;
        vm.vmm.run(Command::Resume, &[]).await?;
    }
    let clock = agent.clock(ClockRequest::default()).await?;
    ensure!(clock.monotonic_ns > 0, "{clock:?}");

    vm.sh("echo kept > /root/kept").await?;
    vm.vmm.run(Command::PowerButton, &[]).await?;
    let (cause, how) = vm.wait_stopped().await?;
    ensure!(
        cause == StopCause::PowerOff && how == HowEnded::Code(ExitCode::Ok as u8),
        "{cause:?}, {how:?}"
    );
    // A clean end has written everything to disk.
    let root = vm.disks().await.into_iter().next().context("no root")?;
    let again = run
        .kit
        .boot(BootOptions {
            root: Root::Disk(root),
            ..Default::default()
        })
        .await?;
    ensure!(again.sh("cat /root/kept").await? == "kept", "lost");
    Ok(())
}

async fn phase(vm: &Vm) -> anyhow::Result<VmmPhase> {
    match vm.vmm.call(Command::Status, &[]).await? {
        Reply::Status(status) => Ok(status.phase),
        reply => anyhow::bail!("{reply:?} is no status"),
    }
}

pub async fn every_end_has_its_code(run: Run) -> anyhow::Result<()> {
    let kit = &run.kit;
    let small = || BootOptions {
        root: Root::None,
        ..Default::default()
    };
    let vm = kit.boot(small()).await?;
    shutdown(&vm, ShutdownMode::Reboot).await?;
    expect_stop(&vm, StopCause::Reset, ExitCode::Reset).await?;

    let vm = kit.boot(small()).await?;
    shutdown(&vm, ShutdownMode::Poweroff).await?;
    expect_stop(&vm, StopCause::PowerOff, ExitCode::Ok).await?;

    let vm = kit.boot(BootOptions::default()).await?;
    let panic = ExecRequest {
        shell: Some("echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger".into()),
        ..Default::default()
    };
    // The guest panics before it can answer.
    let panicking = vm.exec(panic);
    let (_, ended) = tokio::join!(
        tokio::time::timeout(Duration::from_secs(5), panicking),
        expect_stop(&vm, StopCause::GuestPanic, ExitCode::GuestPanic)
    );
    ended?;

    let vm = kit.boot(small()).await?;
    let how = vm.stop().await?;
    ensure!(how == HowEnded::Code(ExitCode::Ok as u8), "{how:?}");
    Ok(())
}

async fn shutdown(vm: &Vm, mode: ShutdownMode) -> anyhow::Result<()> {
    let request = ShutdownRequest {
        mode,
        ..Default::default()
    };
    Ok(vm.agent().await?.shutdown(request).await?)
}

async fn expect_stop(vm: &Vm, wanted: StopCause, code: ExitCode) -> anyhow::Result<()> {
    let (cause, how) = vm
        .wait_stopped()
        .await
        .with_context(|| format!("waiting for {wanted:?}; console:\n{}", vm.console()))?;
    ensure!(
        cause == wanted && how == HowEnded::Code(code as u8),
        "{cause:?} and {how:?} instead of {wanted:?}"
    );
    Ok(())
}

/// VMs go on without a controller, and the next controller adopts them.
pub async fn adopted_by_the_next_controller(mut run: Run) -> anyhow::Result<()> {
    let vm = run.kit.boot(BootOptions::default()).await?;
    vm.sh("echo mine > /root/mark").await?;
    let folder = vm.folder().to_owned();
    let process = vm.release();
    run.kit.reconnect().await?;
    let mut adopted = run.kit.adopt(&folder, 1).await?;
    ensure!(adopted.len() == 1, "{} VMs are there", adopted.len());
    let vm = adopted.pop().context("no VM")?;
    ensure!(vm.process.id == process.id, "another VM");
    ensure!(phase(&vm).await? == VmmPhase::Running, "not running");
    ensure!(vm.sh("cat /root/mark").await? == "mine", "another guest");
    vm.kill();
    let how = vm.wait_end().await?;
    ensure!(how == HowEnded::Signal(SIGKILL), "{how:?}");
    ensure!(run.kit.spawner.status().await?.live == 0, "still live");
    Ok(())
}

/// VMMs end when `forkd-spawn` is killed and no other process holds their control sockets.
pub async fn no_orphans(mut run: Run) -> anyhow::Result<()> {
    let options = || BootOptions {
        root: Root::None,
        ..Default::default()
    };
    let running = run.kit.boot(options()).await?;
    let paused = run.kit.boot_without_agent(options()).await?;
    paused.vmm.run(Command::Pause, &[]).await?;
    run.kit.spawner.set_pool(running.process.shape, 2).await?;
    let pools_filled = async {
        loop {
            let status = run.kit.spawner.status().await?;
            if status.pools.iter().map(|pool| pool.ready).sum::<u32>() == 2 {
                return anyhow::Ok(());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), pools_filled)
        .await
        .context("the pool does not fill")??;
    let pids = procfs::children(run.kit.spawner_pid())?;
    ensure!(pids.len() == 4, "{} processes instead of 4", pids.len());
    // They end although the ends of their control sockets are still held here.
    run.kit.kill_spawner()?;
    let all_gone = async {
        while pids.iter().any(|pid| procfs::is_alive(*pid)) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), all_gone)
        .await
        .with_context(|| format!("some of {pids:?} live on"))?;
    drop((running, paused));
    Ok(())
}

/// A workspace resumes under its old ID: after the end of a VM is acknowledged, its ID is free at once.
pub async fn a_killed_id_is_free(run: Run) -> anyhow::Result<()> {
    let vm = run.kit.boot_without_agent(BootOptions::default()).await?;
    let (id, shape) = (vm.process.id.clone(), vm.process.shape);
    let spawner = &run.kit.spawner;
    for round in 0..10 {
        spawner.kill(&id).await?;
        let ids = std::slice::from_ref(&id);
        let again = spawner
            .take(shape, ids, &Limits::default(), Jail::default())
            .await;
        let taken = again.with_context(|| format!("round {round}"))?;
        ensure!(taken.len() == 1, "{} shells", taken.len());
    }
    spawner.kill(&id).await?;
    let status = spawner.status().await?;
    ensure!(status.live == 0, "{} are live", status.live);
    Ok(())
}
