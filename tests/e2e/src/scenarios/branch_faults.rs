//! Branches with injected faults.
//!
//! After each fault the source goes on and is correct, no partial snapshot exists, and no process, file,
//! socket or mount is left over.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use forkd_guest_proto::ProcessState;
use forkd_testkit::{
    BootOptions, CutFiles, ForkOptions, Frozen, Killer, Kit, SmallDisk, Vm, procfs,
};
use forkd_vmm_proto::VmmErrorCode;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::load::check_chain;
use crate::scenario::{Registered, Run, everyday, times};
use crate::support::vmm_error;

pub const SCENARIOS: &[Registered] = &[everyday!(source_outlives_every_fault).in_parts(PARTS)];

/// A soak has this many of these scenarios, with a thousand branches together.
pub const PARTS: usize = 10;
const CHAIN: &str = "/root/chain";
/// Branches per source. Every cut adds layers, and their number is limited.
const ROUNDS_A_SOURCE: usize = 10;
/// Faults between two children of a successful cut.
const CHILD_EVERY: usize = 3;
/// A file system of this size becomes full while the memory of a cut is written.
const SMALL_DISK_MIB: std::ops::Range<u32> = 1..32;
/// Time in which ends of processes and connections must show.
const SETTLE_LIMIT: Duration = Duration::from_secs(30);

/// The injected fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    /// The process that writes the memory is killed.
    WriterKilled,
    /// The file system becomes full while memory is written.
    DiskFills,
    /// There is no space for the memory; this is known before the source stops.
    NoSpaceForMemory,
    /// There is no space for the page index, after the memory is written.
    NoSpaceForIndex,
    /// There is no space for the state, after everything else is written.
    NoSpaceForState,
    /// The VMM of a child is killed during or soon after its restore.
    ChildKilled,
}

const FAULTS: [Fault; 6] = [
    Fault::WriterKilled,
    Fault::DiskFills,
    Fault::NoSpaceForMemory,
    Fault::NoSpaceForIndex,
    Fault::NoSpaceForState,
    Fault::ChildKilled,
];

pub async fn source_outlives_every_fault(mut run: Run) -> anyhow::Result<()> {
    let kit = &mut run.kit;
    let (parent, load) = under_load(kit).await?;
    // This shell refuses every partial cut, and stays usable each time.
    let refuser = kit.empty(parent.shape).await?;
    let seed: u64 = rand::random();
    let mut random = StdRng::seed_from_u64(seed);
    let total = times(10, 1_000 / PARTS);
    let mut failed: BTreeMap<Fault, (usize, usize)> = BTreeMap::new();
    let started = Instant::now();
    for first in (0..total).step_by(ROUNDS_A_SOURCE) {
        let mut source = Source::start(kit, &parent, load).await?;
        for number in first..total.min(first + ROUNDS_A_SOURCE) {
            let fault = FAULTS[number % FAULTS.len()];
            let hit = round(kit, &mut source, &refuser, fault, &mut random)
                .await
                .with_context(|| format!("seed {seed}, branch {number}: {fault:?}"))?;
            if number % CHILD_EVERY == 0 {
                child_is_whole(kit, &mut source)
                    .await
                    .with_context(|| format!("seed {seed}, after branch {number}: {fault:?}"))?;
            }
            source.traces.settle(kit, &source.vm).await?;
            let (hits, all) = failed.entry(fault).or_default();
            *hits += usize::from(hit);
            *all += 1;
        }
        source.whole_chain().await?;
        source.vm.remove().await?;
        let done = total.min(first + ROUNDS_A_SOURCE);
        eprintln!("{done} faults after {:.0?}", started.elapsed());
    }
    for (fault, (hits, all)) in &failed {
        eprintln!("{fault:?}: {all} times, {hits} before the work was done");
    }
    Ok(())
}

/// A frozen VM under load, and the process ID of the load.
async fn under_load(kit: &Kit) -> anyhow::Result<(Frozen, u64)> {
    let vm = kit.boot(BootOptions::default()).await?;
    vm.put_self().await?;
    let request = vm.guest_half("load", &[CHAIN]);
    let load = vm.agent().await?.start(request).await?.process;
    goes_on(&vm, load, 0).await?;
    Ok((vm.freeze().await?, load))
}

/// One branch with a fault, and the checks afterwards. Returns whether the branch failed: a kill may come too
/// late.
async fn round(
    kit: &mut Kit,
    source: &mut Source,
    refuser: &Vm,
    fault: Fault,
    random: &mut StdRng,
) -> anyhow::Result<bool> {
    let hit = match fault {
        Fault::WriterKilled => writer_killed(kit, source, refuser, random).await?,
        Fault::DiskFills => disk_fills(kit, source, refuser, random).await?,
        Fault::NoSpaceForMemory => {
            full(kit, source, refuser, |files| &mut files.memory).await?;
            true
        }
        Fault::NoSpaceForIndex => {
            full(kit, source, refuser, |files| &mut files.index).await?;
            true
        }
        Fault::NoSpaceForState => {
            full(kit, source, refuser, |files| &mut files.state).await?;
            true
        }
        Fault::ChildKilled => child_killed(kit, source, random).await?,
    };
    source.count = goes_on(&source.vm, source.load, source.count).await?;
    Ok(hit)
}

/// The source can be cut again, and a child of that cut has all data.
async fn child_is_whole(kit: &Kit, source: &mut Source) -> anyhow::Result<()> {
    let cut = source.vm.branch_to(source.changes()).await?;
    let child = kit.fork_named(&cut, "after-a-fault").await?;
    goes_on(&child, source.load, source.count).await?;
    child.remove().await
}

/// A machine under load.
struct Source {
    vm: Vm,
    load: u64,
    /// The last known progress of the load.
    count: u64,
    traces: Traces,
}

impl Source {
    async fn start(kit: &Kit, parent: &Frozen, load: u64) -> anyhow::Result<Self> {
        let vm = kit.fork_named(parent, "source").await?;
        Ok(Self {
            traces: Traces::now(kit, &vm).await?,
            vm,
            load,
            count: 0,
        })
    }

    /// Files for an incremental cut.
    fn changes(&self) -> CutFiles {
        CutFiles::in_folder(self.vm.folder(), true)
    }

    /// Checks everything that the load has written.
    async fn whole_chain(&self) -> anyhow::Result<()> {
        let text = self.vm.sh(&format!("cat {CHAIN}; echo")).await?;
        let last = check_chain(&text)?;
        ensure!(last >= self.count, "{last} after {}", self.count);
        Ok(())
    }
}

/// Waits until the load, which checks itself in every round, has advanced beyond `count`.
async fn goes_on(vm: &Vm, load: u64, count: u64) -> anyhow::Result<u64> {
    let line = format!(
        "tail -n 1 {CHAIN} 2>/dev/null; dmesg | grep -c -i -e 'i/o error' -e 'ext4-fs error' -e 'bug:'; true"
    );
    let coming = async {
        loop {
            let text = vm.sh(&line).await?;
            let (last, complaints) = text.rsplit_once('\n').unwrap_or(("", &text));
            ensure!(complaints == "0", "{complaints} complaints of the kernel");
            let number = last.split_once(' ').map_or("0", |(number, _)| number);
            // The last line may be incomplete.
            let now = number.parse().unwrap_or(0);
            if now > count {
                return anyhow::Ok(now);
            }
            let processes = vm.agent().await?.processes().await?;
            let found = processes.iter().find(|info| info.process == load);
            let found = found.context("the load is not listed")?;
            ensure!(found.state == ProcessState::Running, "{found:?}");
        }
    };
    tokio::time::timeout(Duration::from_secs(120), coming)
        .await
        .context("the load does not go on")?
}

/// A partial cut is refused, and then removed.
async fn none_left(kit: &Kit, source: &Vm, refuser: &Vm, files: &CutFiles) -> anyhow::Result<()> {
    let state = std::fs::metadata(&files.state)?;
    ensure!(
        !state.is_file() || state.len() == 0,
        "a failed cut has a state file of {} bytes",
        state.len()
    );
    let half = Frozen {
        shape: source.process.shape,
        state: files.state.clone(),
        below: Vec::new(),
        memory: files.memory.clone(),
        index: None,
        disks: source.disks().await,
        report: Default::default(),
    };
    let Err(error) = kit.restore(refuser, &half, ForkOptions::default()).await else {
        bail!("half a cut was started");
    };
    let said = vmm_error(&error)?;
    ensure!(
        said.code == VmmErrorCode::BadSnapshot,
        "refused with {said:?}"
    );
    for path in [&files.state, &files.memory, &files.index] {
        if path.starts_with(kit.work()) && path.exists() {
            std::fs::remove_file(path)?;
        }
    }
    Ok(())
}

async fn writer_killed(
    kit: &Kit,
    source: &Source,
    refuser: &Vm,
    random: &mut StdRng,
) -> anyhow::Result<bool> {
    let files = CutFiles::in_folder(source.vm.folder(), random.random());
    let delay = Duration::from_micros(random.random_range(0..100_000));
    let killer = Killer::start(source.vm.pid(), delay);
    let cut = source.vm.branch_to(files.clone()).await;
    killer.stop()?;
    if cut.is_err() {
        none_left(kit, &source.vm, refuser, &files).await?;
    }
    Ok(cut.is_err())
}

/// A cut to a file that accepts no data.
async fn full(
    kit: &Kit,
    source: &Source,
    refuser: &Vm,
    which: fn(&mut CutFiles) -> &mut PathBuf,
) -> anyhow::Result<()> {
    let mut files = source.changes();
    *which(&mut files) = PathBuf::from("/dev/full");
    let cut = source.vm.branch_to(files.clone()).await;
    ensure!(cut.is_err(), "a cut to a full disk worked");
    none_left(kit, &source.vm, refuser, &files).await
}

async fn disk_fills(
    kit: &Kit,
    source: &Source,
    refuser: &Vm,
    random: &mut StdRng,
) -> anyhow::Result<bool> {
    let disk = SmallDisk::mount(kit.folder("small")?, random.random_range(SMALL_DISK_MIB))?;
    // A full cut, which certainly does not fit.
    let files = CutFiles::in_folder(&disk.folder, false);
    let cut = source.vm.branch_to(files.clone()).await;
    ensure!(cut.is_err(), "more fitted than there is space");
    none_left(kit, &source.vm, refuser, &files).await?;
    disk.remove()?;
    Ok(true)
}

async fn child_killed(kit: &Kit, source: &Source, random: &mut StdRng) -> anyhow::Result<bool> {
    let cut = source.vm.branch_to(source.changes()).await?;
    let child = kit.empty(cut.shape).await?;
    let delay = Duration::from_micros(random.random_range(0..500_000));
    let answered = tokio::select! {
        done = async {
            kit.restore(&child, &cut, ForkOptions::default()).await?;
            child.answers().await
        } => Some(done?),
        () = tokio::time::sleep(delay) => None,
    };
    child.kill();
    child.wait_end().await?;
    child.remove().await?;
    Ok(answered.is_none())
}

/// Counts that must not grow.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Traces {
    /// Processes that have files of the test open.
    processes: Vec<u32>,
    counts: Counts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Counts {
    spawner_files: usize,
    own_files: usize,
    /// Open files of the source's VMM, without the layers of its disks.
    source_files: usize,
    sockets: usize,
    mounts: usize,
}

impl Counts {
    /// The minimum of both. A connection that is being closed may be counted once, but not for ever.
    fn least(self, other: Self) -> Self {
        Self {
            spawner_files: self.spawner_files.min(other.spawner_files),
            own_files: self.own_files.min(other.own_files),
            source_files: self.source_files.min(other.source_files),
            sockets: self.sockets.min(other.sockets),
            mounts: self.mounts.min(other.mounts),
        }
    }
}

impl Traces {
    async fn now(kit: &Kit, source: &Vm) -> anyhow::Result<Self> {
        let disks = source.disks().await;
        let layers: usize = disks.iter().map(|disk| disk.layers.len()).sum();
        let work = kit.work().to_string_lossy().into_owned();
        let mounts = std::fs::read_to_string("/proc/self/mounts")?;
        Ok(Self {
            processes: procfs::using(kit.work())?,
            counts: Counts {
                spawner_files: procfs::open_files(kit.spawner_pid())?,
                own_files: procfs::open_files(std::process::id())?,
                source_files: procfs::open_files(source.pid())? - layers,
                sockets: procfs::unix_sockets_below(kit.work())?,
                mounts: mounts.lines().filter(|line| line.contains(&work)).count(),
            },
        })
    }

    /// Waits until the counts are down to the lowest ones seen.
    async fn settle(&mut self, kit: &Kit, source: &Vm) -> anyhow::Result<()> {
        let begun = Instant::now();
        loop {
            let now = Self::now(kit, source).await?;
            self.counts = self.counts.least(now.counts);
            if now == *self {
                return Ok(());
            }
            ensure!(
                begun.elapsed() < SETTLE_LIMIT,
                "{now:?} instead of {self:?}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
