//! Branches of a running VM under load.
//!
//! A child of the branch is consistent: counter, files, database and TCP conversation agree. The source and
//! its connections go on.

use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use forkd_agent_client::{Exec, Output};
use forkd_guest_proto::{ExecRequest, ProcessState};
use forkd_testkit::{BootOptions, CutFiles, Frozen, Kit, Vm};
use forkd_vmm_proto::Command;

use super::load::check_chain;
use crate::scenario::{Registered, Run, everyday, times};

pub const SCENARIOS: &[Registered] = &[everyday!(consistent_under_load)];

const CHAIN: &str = "/root/chain";
const LEDGER: &str = include_str!("ledger.py");
/// Branches between two merges of the source's disk layers.
const MERGE_EVERY: usize = 8;
/// Incremental branches between two full ones.
const WHOLE_EVERY: usize = 16;

pub async fn consistent_under_load(run: Run) -> anyhow::Result<()> {
    let kit = &run.kit;
    let processors = std::thread::available_parallelism()?.get();
    let options = BootOptions {
        // In a long soak, two vCPUs on one CPU mostly wait for each other.
        vcpus: times(2, processors.min(2)) as u8,
        ..Default::default()
    };
    let source = kit.boot(options).await?;
    source.put_self().await?;
    let load = source
        .agent()
        .await?
        .start(source.guest_half("load", &[CHAIN]))
        .await?;
    let ledger = source.agent().await?.start(ledger()).await?;
    let running = [load.process, ledger.process];
    let mut conversation = Conversation::begin(&source).await?;
    let started = Instant::now();
    let mut chain = Vec::new();
    let mut pauses = Vec::new();
    let mut seen = Seen::default();
    for number in 0..times(2, 200) {
        seen = advances(&source, seen).await?;
        // Most branches hold the changes since the one before.
        let whole = number % WHOLE_EVERY == 0;
        let files = CutFiles::in_folder(source.folder(), !whole);
        let cut = source.branch_to(files).await?;
        conversation.goes_on(number).await?;
        let mut replaced = Vec::new();
        if number % MERGE_EVERY == 1 {
            replaced = source.merge_layers().await?;
        }
        pauses.push(cut.report.pause_us);
        let child = kit.fork_named(&cut, &format!("branch-{number}")).await?;
        // The child goes on from the cut, and the source as if nothing had happened.
        for (vm, other) in [(&child, &source), (&source, &child)] {
            // Two busy VMs would slow each other down.
            other.vmm.run(Command::Pause, &[]).await?;
            advances(vm, seen).await?;
            runs_on(vm, &running).await?;
            other.vmm.run(Command::Resume, &[]).await?;
        }
        apart(&child, &source, number).await?;
        if number % 10 == 9 {
            eprintln!("{} branches after {:.0?}", number + 1, started.elapsed());
        }
        child.remove().await?;
        // The child was the last reader of these files.
        replaced.iter().try_for_each(std::fs::remove_file)?;
        if whole {
            chain.drain(..).try_for_each(Frozen::remove)?;
        }
        chain.push(cut);
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
    recovers_from_a_bad_cut(kit, &source, &running).await
}

/// SQLite under write load and a TCP conversation in the guest. Both end if they disagree.
fn ledger() -> ExecRequest {
    let argv = ["python3", "-c", LEDGER, "/root/ledger.db"];
    ExecRequest {
        argv: argv.map(str::to_owned).to_vec(),
        ..Default::default()
    }
}

/// Progress of a guest.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    /// Links of the chain.
    chain: u64,
    /// Entries that the ledger has checked.
    ledger: u64,
}

/// Collects everything with one command, because a command takes long in a busy guest. Checks the whole
/// chain.
async fn look(vm: &Vm) -> anyhow::Result<Seen> {
    let text = vm
        .sh(&format!(
            "echo $(cat /run/ledger 2>/dev/null || echo 0)
             dmesg | grep -c -i -e 'i/o error' -e 'ext4-fs error' -e 'bug:'
             cat {CHAIN} 2>/dev/null; echo"
        ))
        .await?;
    let mut parts = text.splitn(3, '\n');
    let mut next = || parts.next().context("something is missing");
    let (ledger, complaints) = (next()?, next()?);
    let chain = parts.next().unwrap_or_default();
    ensure!(complaints == "0", "{complaints} complaints of the kernel");
    let (chain, ledger) = (check_chain(chain)?, ledger.parse()?);
    Ok(Seen { chain, ledger })
}

/// Waits until chain and ledger have advanced.
async fn advances(vm: &Vm, from: Seen) -> anyhow::Result<Seen> {
    let coming = async {
        loop {
            let now = look(vm).await?;
            if now.chain > from.chain && now.ledger > from.ledger {
                return anyhow::Ok(now);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), coming)
        .await
        .with_context(|| format!("the load does not go on after {from:?}"))?
}

/// A conversation with a process of the source, over one connection to its agent.
struct Conversation(Exec);

impl Conversation {
    async fn begin(vm: &Vm) -> anyhow::Result<Self> {
        let request = ExecRequest {
            argv: vec!["cat".to_owned()],
            stdin: true,
            ..Default::default()
        };
        Ok(Self(vm.agent().await?.exec(request).await?))
    }

    /// Everything that is sent comes back unchanged.
    async fn goes_on(&mut self, number: usize) -> anyhow::Result<()> {
        let line = format!("{number}\n");
        self.0.stdin().write(line.as_bytes()).await?;
        let mut heard = Vec::new();
        while heard.len() < line.len() {
            match self.0.next_output().await? {
                Some(Output::Stdout(bytes)) => heard.extend(bytes),
                other => bail!("{other:?} in place of the echo of {number}"),
            }
        }
        ensure!(
            heard == line.as_bytes(),
            "the echo of {number} is {heard:?}"
        );
        Ok(())
    }
}

async fn runs_on(vm: &Vm, running: &[u64]) -> anyhow::Result<()> {
    let processes = vm.agent().await?.processes().await?;
    for process in running {
        let info = processes.iter().find(|info| info.process == *process);
        let info = info.context("the load is not listed")?;
        ensure!(info.state == ProcessState::Running, "{info:?}");
    }
    Ok(())
}

/// Writes of one VM after the cut do not appear in the other.
async fn apart(child: &Vm, source: &Vm, number: usize) -> anyhow::Result<()> {
    child
        .sh(&format!("echo child > /root/side-{number}; sync"))
        .await?;
    let seen = source
        .sh(&format!(
            "cat /root/side-{number} 2>/dev/null || echo none; echo source > /root/side-{number}; sync"
        ))
        .await?;
    ensure!(seen == "none", "the source has the child's file");
    let seen = child.sh(&format!("cat /root/side-{number}")).await?;
    ensure!(seen == "child", "the child has {seen:?}");
    Ok(())
}

/// A cut that cannot be written leaves the source running.
async fn recovers_from_a_bad_cut(kit: &Kit, source: &Vm, running: &[u64]) -> anyhow::Result<()> {
    let before = advances(source, Seen::default()).await?;
    ensure!(
        source.branch_to_full_disk().await.is_err(),
        "a cut to a full disk worked"
    );
    advances(source, before).await?;
    runs_on(source, running).await?;
    let cut = source.branch().await?;
    let child = kit.fork_named(&cut, "after-a-bad-cut").await?;
    advances(&child, before).await?;
    Ok(())
}
