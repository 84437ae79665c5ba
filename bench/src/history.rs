//! What a cut and a roll-back cost, with a guest of a few bytes that does nothing but write to memory.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use forkd_types::MiB;
use forkd_vmm::client::{Attach, Client};
use forkd_vmm::tiny;
use forkd_vmm_proto::{
    BootSpec, CheckpointSpec, Command, ConsoleSpec, CpuModel, CutReport, CutSpec, MemoryImage,
    PageIndex, Reply, RestoreSpec, RollbackReport, RollbackSpec, Shape, VsockSpec,
};

use crate::report::{Cut, PagesFrom, Parts, Rollback};
use crate::spawned::beside;
use crate::stats::Spread;

/// Passes of the guest over its pages before something is measured.
const PASSES: usize = 2;

/// A frozen guest and the place for files.
struct Frozen {
    state: File,
    memory: File,
    shape: Shape,
    work: PathBuf,
}

/// A running guest.
struct Running {
    client: Client,
    work: PathBuf,
    _around: (tempfile::TempDir, OwnedFd, File),
}

impl Frozen {
    /// A guest that writes to so much of its memory, frozen before its first instruction.
    fn new(work: &Path, memory: MiB, dirty: MiB) -> anyhow::Result<Self> {
        let shape = Shape {
            memory,
            vcpus: 1,
            cpu: CpuModel::Host,
        };
        let mut vm = Running::shell(work, shape)?;
        let mut kernel = tempfile::tempfile_in(work)?;
        let program = tiny::dirtying(dirty.0 * 256);
        std::io::Write::write_all(&mut kernel, &program)?;
        let (_, listener, console) = &vm._around;
        let mut attach = Attach::new();
        let spec = BootSpec {
            kernel: attach.add(&kernel),
            initramfs: None,
            cmdline: String::new(),
            disks: Vec::new(),
            net: None,
            vsock: vsock(listener, &mut attach),
            console: output(console, &mut attach),
            generation: [1; 16],
            run: false,
        };
        vm.client.boot(spec, &attach)?;
        let (state, image) = (tempfile::tempfile_in(work)?, tempfile::tempfile_in(work)?);
        let mut attach = Attach::new();
        let spec = CutSpec {
            state: attach.add(&state),
            memory: attach.add(&image),
            only_changed: false,
            onto: 0,
            index: None,
            new_layers: Vec::new(),
            resume: false,
        };
        vm.client.cut(spec, &attach)?;
        Ok(Self {
            state,
            memory: image,
            shape,
            work: work.to_owned(),
        })
    }

    fn start(&self, run: bool) -> anyhow::Result<Running> {
        let mut vm = Running::shell(&self.work, self.shape)?;
        let (_, listener, console) = &vm._around;
        let mut attach = Attach::new();
        let spec = RestoreSpec {
            state: attach.add(&self.state),
            memory: MemoryImage {
                layers: vec![attach.add(&self.memory)],
                index: PageIndex::Identity,
            },
            disks: Vec::new(),
            net: None,
            vsock: vsock(listener, &mut attach),
            console: output(console, &mut attach),
            generation: [2; 16],
            prefault: None,
            run,
        };
        vm.client.restore(spec, &attach)?;
        Ok(vm)
    }
}

fn vsock<'a>(listener: &'a OwnedFd, attach: &mut Attach<'a>) -> VsockSpec {
    VsockSpec {
        cid: 3,
        listener: attach.add(listener),
    }
}

fn output<'a>(console: &'a File, attach: &mut Attach<'a>) -> ConsoleSpec {
    ConsoleSpec {
        output: attach.add(console),
        bytes_per_second: 0,
        max_bytes: 1 << 20,
    }
}

impl Running {
    fn shell(work: &Path, shape: Shape) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir_in(work)?;
        let listener = UnixListener::bind(dir.path().join("vsock"))?;
        let console = File::create(dir.path().join("console"))?;
        let mut client = Client::start(&beside("forkd-vmm")?, &[])
            .context("forkd-vmm did not start: build it first with `make build`")?;
        client.prepare(shape)?;
        Ok(Self {
            client,
            work: work.to_owned(),
            _around: (dir, listener.into(), console),
        })
    }

    /// Waits until the guest has gone over all its pages.
    fn let_write(&mut self) -> anyhow::Result<()> {
        // What it said before now is not about now.
        while self.client.try_ready()? {}
        for _ in 0..PASSES {
            self.client.wait_ready()?;
        }
        Ok(())
    }

    /// Cuts onto the last cut.
    fn cut(&mut self, onto: u64) -> anyhow::Result<CutReport> {
        let (state, memory, index) = (self.file()?, self.file()?, self.file()?);
        let mut attach = Attach::new();
        let spec = CutSpec {
            state: attach.add(&state),
            memory: attach.add(&memory),
            only_changed: true,
            onto,
            index: Some(attach.add(&index)),
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

/// Cuts a guest of `memory` that keeps `dirty` of it changing, each cut onto the one before.
pub fn cuts(work: &Path, memory: MiB, dirty: MiB, rounds: usize) -> anyhow::Result<Cut> {
    let mut vm = Frozen::new(work, memory, dirty)?.start(true)?;
    let (mut pauses, mut parts) = (Vec::new(), Vec::new());
    let mut onto = 0;
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

/// Rolls a guest back that has changed `dirty` of its memory.
pub fn rollbacks(
    work: &Path,
    memory: MiB,
    dirty: MiB,
    from: PagesFrom,
    rounds: usize,
) -> anyhow::Result<Rollback> {
    let mut vm = Frozen::new(work, memory, dirty)?.start(from == PagesFrom::Checkpoint)?;
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
