//! Many children of a warm parent: parallel life, several vCPUs, busy disks, grandchildren, and nothing left
//! behind.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, ensure};
use forkd_guest_proto::{NetworkRequest, ProcessState};
use forkd_testkit::{BootOptions, ForkOptions, Frozen, Kit, Vm, procfs};
use futures::future::try_join_all;
use futures::stream::{self, StreamExt, TryStreamExt};

use crate::scenario::{Registered, Run, everyday, soaking, times};
use crate::support::{deaf_network, freeze, warm_python};

pub const SCENARIOS: &[Registered] = &[
    everyday!(many_children),
    everyday!(two_vcpus),
    everyday!(four_vcpus),
    everyday!(busy_disk_and_grandchildren),
];

/// Children that are started, or asked, at one time; the rest waits its turn.
const AT_ONCE: usize = 10;

pub async fn many_children(run: Run) -> anyhow::Result<()> {
    let kit = &run.kit;
    let (_deaf, net) = deaf_network()?;
    let options = BootOptions {
        net: Some(net),
        ..Default::default()
    };
    let parent = warm_python(kit, options).await?;
    parent.eval("answer = {'base': 1000}").await?;
    parent.sh("echo of the parent > /root/file").await?;
    let frozen = freeze(parent).await?;

    let before = Host::now(kit)?;
    let mut children = Vec::new();
    let count = times(10, 100);
    for first in (0..count).step_by(AT_ONCE) {
        let numbers = first..count.min(first + AT_ONCE);
        children.extend(try_join_all(numbers.map(|n| child(kit, &frozen, n))).await?);
    }
    // All children are alive. Each one has kept its own answer while the others started.
    let all = children.iter().enumerate();
    let checks = all.map(|(number, (child, _))| check(child, number));
    let seen: Vec<Seen> = stream::iter(checks).buffered(AT_ONCE).try_collect().await?;
    let different = |of: fn(&Seen) -> &String| seen.iter().map(of).collect::<BTreeSet<_>>().len();
    for (what, found) in [
        ("hostname", different(|seen| &seen.hostname)),
        ("hardware address", different(|seen| &seen.mac)),
        ("random number", different(|seen| &seen.random)),
    ] {
        ensure!(found == count, "{found} of {count} have their own {what}");
    }
    let memory: u64 = children
        .iter()
        .map(|(child, _)| {
            procfs::memory(child.pid()).map(|memory| memory.own_pss + memory.guest_pss)
        })
        .sum::<anyhow::Result<u64>>()?;
    eprintln!(
        "{count} children alive: {} KiB of memory each (PSS of the VMM, guest included)",
        memory / count as u64
    );
    for (child, _) in &children {
        child.stop().await?;
        std::fs::remove_dir_all(child.folder())?;
    }
    drop(children);
    before.is_back(kit).await
}

type WithNet = (Vm, std::os::fd::OwnedFd);

async fn child(kit: &Kit, frozen: &Frozen, number: usize) -> anyhow::Result<WithNet> {
    let (deaf, net) = deaf_network()?;
    let options = ForkOptions {
        net: Some(net),
        ..Default::default()
    };
    let vm = kit.fork_with(frozen, options).await?;
    vm.answers().await?;
    let network = NetworkRequest {
        mac: Some(format!(
            "02:00:00:00:{:02x}:{:02x}",
            number / 256,
            number % 256
        )),
        ..Default::default()
    };
    vm.identify(&format!("child-{number}"), Some(network))
        .await?;
    vm.eval(&format!("answer['own'] = {number}")).await?;
    vm.sh(&format!(
        "cat /root/file > /root/mine; echo {number} >> /root/mine; sync"
    ))
    .await?;
    Ok((vm, deaf))
}

struct Seen {
    hostname: String,
    mac: String,
    random: String,
}

async fn check(vm: &Vm, number: usize) -> anyhow::Result<Seen> {
    let answer = vm.eval("answer['base'] + answer['own']").await?;
    ensure!(
        answer == 1000 + number as u64,
        "child {number} answers {answer}"
    );
    let file = vm.sh("cat /root/mine").await?;
    ensure!(
        file == format!("of the parent\n{number}"),
        "child {number} has the file {file:?}"
    );
    let mac = vm
        .sh("cat /sys/class/net/[!l]*/address | head -n 1")
        .await?;
    Ok(Seen {
        hostname: vm.sh("uname -n").await?,
        mac,
        random: vm.eval("random.random()").await?.to_string(),
    })
}

/// Host resources that must return to their old values after the VMs end.
struct Host {
    processes: usize,
    files: usize,
    sockets: usize,
    memory: u64,
}

impl Host {
    fn now(kit: &Kit) -> anyhow::Result<Self> {
        Ok(Self {
            processes: procfs::children(kit.spawner_pid())?.len(),
            files: procfs::open_files(kit.spawner_pid())?,
            sockets: procfs::unix_sockets_below(kit.work())?,
            memory: procfs::available_memory()?,
        })
    }

    /// Waits until everything is as before. Memory is compared in a soak only, where no other scenario runs
    /// at the same time.
    async fn is_back(&self, kit: &Kit) -> anyhow::Result<()> {
        let slack = 100 * 1024;
        let mut now = Self::now(kit)?;
        for _ in 0..60 {
            if !soaking() || now.memory + slack >= self.memory {
                break;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
            now = Self::now(kit)?;
        }
        ensure!(
            now.processes == self.processes
                && now.files == self.files
                && now.sockets == self.sockets,
            "{} processes, {} files and {} sockets, before {}, {} and {}",
            now.processes,
            now.files,
            now.sockets,
            self.processes,
            self.files,
            self.sockets
        );
        ensure!(
            !soaking() || now.memory + slack >= self.memory,
            "{} KiB of memory are free, before {}",
            now.memory,
            self.memory
        );
        Ok(())
    }
}

pub async fn two_vcpus(run: Run) -> anyhow::Result<()> {
    with_vcpus(&run.kit, 2).await
}

pub async fn four_vcpus(run: Run) -> anyhow::Result<()> {
    with_vcpus(&run.kit, 4).await
}

async fn with_vcpus(kit: &Kit, vcpus: u8) -> anyhow::Result<()> {
    let options = BootOptions {
        vcpus,
        ..Default::default()
    };
    let parent = kit.boot(options).await?;
    // Every vCPU is busy at the cut.
    let agent = parent.agent().await?;
    for cpu in 0..vcpus {
        let line = format!("exec taskset -c {cpu} sh -c 'n=0; while :; do n=$((n+1)); done'");
        agent.start(shell(&line)).await?;
    }
    let frozen = freeze(parent).await?;
    for number in 0..2 {
        let child = kit.fork_named(&frozen, &format!("child-{number}")).await?;
        for cpu in 0..vcpus {
            let ran = child
                .sh(&format!(
                    "taskset -c {cpu} sh -c 'cut -d\" \" -f39 /proc/self/stat'"
                ))
                .await?;
            ensure!(ran == cpu.to_string(), "on vCPU {ran} instead of {cpu}");
        }
        let processes = child.agent().await?.processes().await?;
        let running = processes
            .iter()
            .filter(|process| process.state == ProcessState::Running)
            .count();
        ensure!(
            running >= usize::from(vcpus),
            "{running} processes of the parent go on"
        );
    }
    Ok(())
}

fn shell(line: &str) -> forkd_guest_proto::ExecRequest {
    forkd_guest_proto::ExecRequest {
        shell: Some(line.to_owned()),
        ..Default::default()
    }
}

/// The parent writes to its disk during the cut. Children and grandchildren go on from there.
pub async fn busy_disk_and_grandchildren(run: Run) -> anyhow::Result<()> {
    let kit = &run.kit;
    let parent = kit.boot(BootOptions::default()).await?;
    parent.put_self().await?;
    let load = parent
        .agent()
        .await?
        .start(parent.guest_half("load", &["/root/chain"]))
        .await?;
    progress(&parent, 3).await?;
    let mut frozen = parent.freeze().await?;
    let mut count = 0;
    for generation in 1..=3 {
        let vm = kit
            .fork_named(&frozen, &format!("generation-{generation}"))
            .await?;
        vm.sh(&format!("echo {generation} >> /root/generations"))
            .await?;
        let seen = vm.sh("tr '\\n' ' ' < /root/generations").await?;
        let wanted: String = (1..=generation).map(|n| format!("{n} ")).collect();
        ensure!(seen.trim_end() == wanted.trim_end(), "{seen:?}");
        count = progress(&vm, count + 1).await?;
        still_runs(&vm, load.process).await?;
        frozen = freeze(vm).await?;
    }
    Ok(())
}

/// Waits until the load has reached this number.
async fn progress(vm: &Vm, wanted: u64) -> anyhow::Result<u64> {
    let coming = async {
        loop {
            let line = vm.sh("tail -n 1 /root/chain 2>/dev/null || true").await?;
            let now = line
                .split_once(' ')
                .and_then(|(number, _)| number.parse::<u64>().ok())
                .unwrap_or(0);
            if now >= wanted {
                return anyhow::Ok(now);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), coming)
        .await
        .context("the load does not go on")?
}

async fn still_runs(vm: &Vm, process: u64) -> anyhow::Result<()> {
    let processes = vm.agent().await?.processes().await?;
    let info = processes.iter().find(|info| info.process == process);
    let info = info.context("the load is not listed")?;
    ensure!(info.state == ProcessState::Running, "{info:?}");
    Ok(())
}
