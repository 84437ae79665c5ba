//! Damaged snapshots are refused with a reason and never start a guest. A killed writer leaves no snapshot.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use forkd_testkit::{BootOptions, ForkOptions, Frozen, Kit, Root, Vm};
use forkd_types::MiB;
use forkd_vmm_proto::{Command, Reply, VmmErrorCode, VmmPhase};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::scenario::{Registered, Run, everyday, times};
use crate::support::vmm_error;

pub const SCENARIOS: &[Registered] = &[
    everyday!(damaged_snapshots_are_refused),
    everyday!(killed_while_it_writes),
];

pub async fn damaged_snapshots_are_refused(run: Run) -> anyhow::Result<()> {
    let kit = &run.kit;
    let frozen = small(kit).await?.freeze().await?;
    let state = std::fs::read(&frozen.state)?;
    // One shell for all attempts: a refusal leaves it usable.
    let shell = kit.empty(frozen.shape).await?;
    let seed: u64 = rand::random();
    let mut random = StdRng::seed_from_u64(seed);
    let folder = kit.folder("damaged")?;
    for number in 0..times(50, 1_000) {
        let (what, bytes) = mutate(&state, &mut random);
        let mut damaged = frozen.clone();
        damaged.state = folder.join(format!("{number}.state"));
        std::fs::write(&damaged.state, bytes)?;
        refused(kit, &shell, &damaged)
            .await
            .with_context(|| format!("seed {seed}, number {number}: {what}"))?;
        std::fs::remove_file(&damaged.state)?;
    }
    let memory = std::fs::metadata(&frozen.memory)?.len();
    for length in [0, 4096, memory / 2, memory - 4096, memory - 1] {
        let mut damaged = frozen.clone();
        damaged.memory = cut_off(&frozen.memory, &folder, length)?;
        refused(kit, &shell, &damaged)
            .await
            .with_context(|| format!("memory of {length} bytes"))?;
        std::fs::remove_file(&damaged.memory)?;
    }
    wrong_surroundings(kit, &frozen).await?;

    // The shell that has refused all damaged snapshots accepts the valid one.
    kit.restore(&shell, &frozen, ForkOptions::default()).await?;
    shell.answers().await?;
    Ok(())
}

/// A guest without a disk, so that little is written.
async fn small(kit: &Kit) -> anyhow::Result<Vm> {
    let options = BootOptions {
        memory: MiB(128),
        root: Root::None,
        ..Default::default()
    };
    kit.boot(options).await
}

fn mutate(state: &[u8], random: &mut StdRng) -> (String, Vec<u8>) {
    let mut bytes = state.to_vec();
    let at = random.random_range(0..bytes.len());
    match random.random_range(0..8) {
        0..4 => {
            let bit = random.random_range(0..8);
            bytes[at] ^= 1 << bit;
            (format!("bit {bit} of byte {at} flipped"), bytes)
        }
        4 => {
            bytes.truncate(at);
            (format!("cut off at {at}"), bytes)
        }
        5 => {
            bytes.insert(at, random.random());
            (format!("a byte put in at {at}"), bytes)
        }
        6 => {
            let end = bytes.len().min(at + random.random_range(1..64));
            bytes[at..end].fill_with(|| random.random());
            // Rubbish may happen to be what was there.
            if bytes == state {
                bytes[at] ^= 0xff;
            }
            (format!("rubbish from {at} to {end}"), bytes)
        }
        _ => {
            bytes.extend_from_slice(&[0; 32]);
            ("zeroes at the end".to_owned(), bytes)
        }
    }
}

async fn refused(kit: &Kit, shell: &Vm, damaged: &Frozen) -> anyhow::Result<()> {
    let Err(error) = kit.restore(shell, damaged, ForkOptions::default()).await else {
        bail!("a guest was started");
    };
    let said = vmm_error(&error)?;
    ensure!(
        matches!(
            said.code,
            VmmErrorCode::BadSnapshot | VmmErrorCode::Incompatible
        ) && !said.message.is_empty(),
        "refused with {said:?}"
    );
    match shell.vmm.call(Command::Status, &[]).await? {
        Reply::Status(status) if status.phase == VmmPhase::Shell => Ok(()),
        other => bail!("after the refusal: {other:?}"),
    }
}

/// A copy of the first bytes of a file.
fn cut_off(path: &Path, folder: &Path, length: u64) -> anyhow::Result<PathBuf> {
    let copy = folder.join("short.memory");
    std::fs::copy(path, &copy)?;
    File::options().write(true).open(&copy)?.set_len(length)?;
    Ok(copy)
}

/// A whole snapshot, and a shell that cannot take it.
async fn wrong_surroundings(kit: &Kit, frozen: &Frozen) -> anyhow::Result<()> {
    let mut shape = frozen.shape;
    shape.vcpus = 2;
    let two = kit.empty(shape).await?;
    let Err(error) = kit.restore(&two, frozen, ForkOptions::default()).await else {
        bail!("a shell with two vCPUs took the state of one");
    };
    let said = vmm_error(&error)?;
    ensure!(
        said.code == VmmErrorCode::Incompatible && said.message.contains("vCPU"),
        "{said:?}"
    );
    Ok(())
}

/// The VMM is killed while it writes. The result is complete, or it is refused.
pub async fn killed_while_it_writes(run: Run) -> anyhow::Result<()> {
    let kit = &run.kit;
    let parent = small(kit).await?.freeze().await?;
    for round in 0..times(4, 200) {
        let vm = kit.fork(&parent).await?;
        let folder = vm.folder().to_owned();
        let shape = vm.process.shape;
        let delay = Duration::from_micros(rand::random_range(0..400_000));
        let finished = tokio::select! {
            cut = vm.branch() => Some(cut?),
            () = tokio::time::sleep(delay) => None,
        };
        vm.kill();
        vm.wait_end().await?;
        let Some((state, memory)) = written(&folder)? else {
            ensure!(finished.is_none(), "a finished cut has no files");
            continue;
        };
        let found = Frozen {
            shape,
            state,
            below: Vec::new(),
            memory,
            index: None,
            disks: Vec::new(),
            report: finished.map(|frozen| frozen.report).unwrap_or_default(),
        };
        let shell = kit.empty(shape).await?;
        match kit.restore(&shell, &found, ForkOptions::default()).await {
            Ok(()) => shell.answers().await?,
            Err(error) => {
                let said = vmm_error(&error)?;
                ensure!(
                    said.code == VmmErrorCode::BadSnapshot,
                    "round {round}, after {delay:?}: {said:?}"
                );
            }
        }
    }
    Ok(())
}

fn written(folder: &Path) -> anyhow::Result<Option<(PathBuf, PathBuf)>> {
    for entry in std::fs::read_dir(folder)? {
        let state = entry?.path();
        if state.extension().is_some_and(|ending| ending == "state") {
            let memory = state.with_extension("memory");
            return Ok(memory.exists().then_some((state, memory)));
        }
    }
    Ok(None)
}
