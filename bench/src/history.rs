//! Cuts and roll-backs of a guest of a few bytes that writes to memory all the time.
//!
//! The guest signals each pass over its pages, so that every measurement starts with the full set dirty.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::bail;
use forkd_types::MiB;
use forkd_vmm_driver::{Attach, Client, tiny};
use forkd_vmm_proto::{
    CheckpointSpec, Command, CutExtent, CutReport, CutSpec, ImageId, Reply, RollbackReport,
    RollbackSpec,
};

use crate::frozen::{self, Frozen, Surroundings};
use crate::report::{Cut, PagesFrom, Parts, Rollback};
use crate::stats::Spread;

/// Passes of the guest over its pages before something is measured.
const PASSES: u64 = 2;

/// A running guest.
struct Running {
    client: Client,
    work: PathBuf,
    _around: (tempfile::TempDir, Surroundings),
}

impl Running {
    /// Starts a guest that writes to `dirty` of its memory.
    fn start(work: &Path, memory: MiB, dirty: MiB, run: bool) -> anyhow::Result<Self> {
        let frozen = Frozen::new(work, memory, &tiny::dirtying(dirty.0 * 256))?;
        let folder = tempfile::tempdir_in(work)?;
        let around = Surroundings::make(folder.path(), 0)?;
        let mut client = frozen::shell(frozen.shape)?;
        let mut attach = Attach::new();
        let spec = frozen.restore(&around, 2, run, &mut attach);
        client.restore(spec, &attach)?;
        Ok(Self {
            client,
            work: work.to_owned(),
            _around: (folder, around),
        })
    }

    /// Waits until the guest has written all its pages.
    fn let_write(&mut self) -> anyhow::Result<()> {
        let end = self.client.ready_signals()? + PASSES;
        while self.client.ready_signals()? < end {
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Cuts onto the last cut.
    fn cut(&mut self, onto: ImageId) -> anyhow::Result<CutReport> {
        let (state, memory, index) = (self.file()?, self.file()?, self.file()?);
        let mut attach = Attach::new();
        let spec = CutSpec {
            state: attach.add(&state),
            memory: attach.add(&memory),
            extent: CutExtent::Since {
                image: onto,
                index: attach.add(&index),
            },
            new_layers: Vec::new(),
            resume: true,
        };
        Ok(self.client.cut(spec, &attach)?)
    }

    fn checkpoint(&mut self) -> anyhow::Result<u64> {
        let memory = self.file()?;
        let mut attach = Attach::new();
        let spec = CheckpointSpec {
            memory: attach.add(&memory),
            new_layers: Vec::new(),
        };
        match self.client.ask(Command::Checkpoint(spec), &attach)? {
            Reply::Checkpoint(report) => Ok(report.id),
            reply => bail!("the VMM answered {reply:?} to a checkpoint"),
        }
    }

    fn rollback(&mut self, to: u64) -> anyhow::Result<RollbackReport> {
        let spec = RollbackSpec {
            to,
            new_layers: Vec::new(),
            generation: [3; 16],
        };
        match self.client.ask(Command::Rollback(spec), &Attach::new())? {
            Reply::Rollback(report) => Ok(report),
            reply => bail!("the VMM answered {reply:?} to a roll-back"),
        }
    }

    fn file(&self) -> anyhow::Result<File> {
        Ok(tempfile::tempfile_in(&self.work)?)
    }
}

/// Cuts a guest of `memory` that keeps `dirty` of it changing. Each cut is based on the one before.
pub fn cuts(work: &Path, memory: MiB, dirty: MiB, rounds: usize) -> anyhow::Result<Cut> {
    let mut vm = Running::start(work, memory, dirty, true)?;
    let (mut pauses, mut parts) = (Vec::new(), Vec::new());
    let mut onto = ImageId::START;
    for _ in 0..rounds {
        vm.let_write()?;
        let report = vm.cut(onto)?;
        pauses.push(Duration::from_micros(report.pause_us));
        parts.push(report.parts);
        onto = report.image;
    }
    Ok(Cut {
        mib: memory.0,
        dirty_mib: dirty.0,
        pause_ms: Spread::of(&pauses),
        parts_ms: Parts::of(&parts),
    })
}

/// Rolls back a guest that has changed `dirty` of its memory.
pub fn rollbacks(
    work: &Path,
    memory: MiB,
    dirty: MiB,
    from: PagesFrom,
    rounds: usize,
) -> anyhow::Result<Rollback> {
    let mut vm = Running::start(work, memory, dirty, from == PagesFrom::Checkpoint)?;
    if from == PagesFrom::Checkpoint {
        vm.let_write()?;
    }
    let checkpoint = vm.checkpoint()?;
    if from == PagesFrom::Image {
        vm.client.ask(Command::Resume, &Attach::new())?;
    }
    let (mut times, mut parts) = (Vec::new(), Vec::new());
    let mut pages = 0;
    for _ in 0..rounds {
        vm.let_write()?;
        let report = vm.rollback(checkpoint)?;
        times.push(Duration::from_micros(report.pause_us));
        parts.push(report.parts);
        pages = report.pages;
    }
    Ok(Rollback {
        dirty_mib: dirty.0,
        from,
        pages,
        ms: Spread::of(&times),
        parts_ms: Parts::of(&parts),
    })
}
