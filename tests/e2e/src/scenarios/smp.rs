//! Several vCPUs: all are online, all work, and programs can choose one.

use anyhow::{Context, ensure};
use forkd_testkit::{BootOptions, Vm};

use crate::scenario::{Registered, Run, everyday};

pub const SCENARIOS: &[Registered] = &[everyday!(four_vcpus)];

const VCPUS: u8 = 4;

/// One process per vCPU. Each sums up its share and prints where it ran.
const PARALLEL: &str = r#"
import multiprocessing as mp, os, sys, time

def share(part):
    number, of, upto = part
    os.sched_setaffinity(0, {number})
    total = sum(n * n for n in range(number, upto, of))
    fields = open("/proc/self/stat").read().rsplit(")", 1)[1].split()
    return number, int(fields[36]), total, time.process_time() > 0

if __name__ == "__main__":
    count, upto = int(sys.argv[1]), int(sys.argv[2])
    with mp.get_context("fork").Pool(count) as pool:
        rows = pool.map(share, [(n, count, upto) for n in range(count)], chunksize=1)
    for wanted, ran, _, worked in rows:
        assert wanted == ran and worked, (wanted, ran, worked)
    print(sum(row[2] for row in rows))
"#;

pub async fn four_vcpus(run: Run) -> anyhow::Result<()> {
    let options = BootOptions {
        vcpus: VCPUS,
        ..Default::default()
    };
    let vm = run.kit.boot(options).await?;
    ensure!(vm.sh("nproc").await? == "4", "nproc");
    ensure!(
        vm.sh("cat /sys/devices/system/cpu/online").await? == "0-3",
        "not all vCPUs are online"
    );
    parallel_computation(&vm).await?;
    affinity(&vm).await
}

async fn parallel_computation(vm: &Vm) -> anyhow::Result<()> {
    let upto: u64 = 400_000;
    let before = busy_ticks(vm).await?;
    let total = vm
        .python(PARALLEL, &[&VCPUS.to_string(), &upto.to_string()])
        .await?;
    let after = busy_ticks(vm).await?;
    let wanted: u128 = (0..u128::from(upto)).map(|n| n * n).sum();
    ensure!(
        total == wanted.to_string(),
        "the sum is {total}, not {wanted}"
    );
    for (cpu, (before, after)) in before.iter().zip(&after).enumerate() {
        ensure!(after > before, "vCPU {cpu} did no work");
    }
    Ok(())
}

/// Ticks that each vCPU has spent in user programs.
async fn busy_ticks(vm: &Vm) -> anyhow::Result<Vec<u64>> {
    let text = vm.sh("grep '^cpu[0-9]' /proc/stat").await?;
    let ticks: Vec<u64> = text
        .lines()
        .map(|line| line.split_whitespace().nth(1).context("no ticks"))
        .map(|field| Ok(field?.parse()?))
        .collect::<anyhow::Result<_>>()?;
    ensure!(ticks.len() == usize::from(VCPUS), "{text}");
    Ok(ticks)
}

async fn affinity(vm: &Vm) -> anyhow::Result<()> {
    ensure!(vm.sh("taskset -c 2 nproc").await? == "1", "one vCPU");
    ensure!(vm.sh("taskset -c 0,3 nproc").await? == "2", "two vCPUs");
    let list = vm
        .sh("taskset -c 3 sh -c 'taskset -cp $$' | sed 's/.*: //'")
        .await?;
    ensure!(list == "3", "the affinity list is {list}");
    Ok(())
}
