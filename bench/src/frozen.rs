//! A guest of a few bytes, frozen before its first instruction.
//!
//! [`Frozen`] has the files that a shell needs to become a child. [`Surroundings`] has the console and the
//! socket that the daemon would make for each VM.

use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::Path;

use anyhow::Context;
use forkd_types::{Engine, MiB};
use forkd_vmm_driver::{Attach, Client};
use forkd_vmm_proto::{
    BootSpec, ConsoleSpec, CpuModel, CutExtent, CutSpec, MemoryImage, NetSpec, PageIndex,
    RestoreSpec, Shape, VsockSpec,
};

use crate::spawned::beside;

/// A frozen guest.
#[derive(Debug)]
pub struct Frozen {
    /// The shape of the shells that can restore it.
    pub shape: Shape,
    state: File,
    memory: File,
}

/// The console and the socket of one VM.
#[derive(Debug)]
pub struct Surroundings {
    console: File,
    listener: UnixListener,
}

impl Surroundings {
    /// Creates the files in a folder; `number` distinguishes them.
    pub fn make(folder: &Path, number: u64) -> anyhow::Result<Self> {
        Ok(Self {
            console: File::create(folder.join(format!("{number}.console")))?,
            listener: UnixListener::bind(folder.join(format!("{number}.vsock")))?,
        })
    }

    fn console<'a>(&'a self, attach: &mut Attach<'a>) -> ConsoleSpec {
        ConsoleSpec {
            output: attach.add(&self.console),
            bytes_per_second: 0,
            max_bytes: 1 << 20,
        }
    }

    fn vsock<'a>(&'a self, attach: &mut Attach<'a>) -> VsockSpec {
        VsockSpec {
            cid: 3,
            listener: attach.add(&self.listener),
        }
    }
}

impl Frozen {
    /// Loads a program in place of a kernel, and freezes the VM.
    pub fn new(work: &Path, memory: MiB, program: &[u8]) -> anyhow::Result<Self> {
        let shape = Shape {
            engine: Engine::FORKD,
            memory,
            vcpus: 1,
            cpu: CpuModel::Host,
        };
        let folder = tempfile::tempdir_in(work)?;
        let around = Surroundings::make(folder.path(), 0)?;
        let mut client = shell(shape)?;
        let mut kernel = tempfile::tempfile_in(work)?;
        kernel.write_all(program)?;
        let mut attach = Attach::new();
        let spec = BootSpec {
            kernel: attach.add(&kernel),
            initramfs: None,
            cmdline: String::new(),
            disks: Vec::new(),
            net: NetSpec::default(),
            mac: [2, 0, 0, 0, 0, 1],
            vsock: around.vsock(&mut attach),
            console: around.console(&mut attach),
            generation: [1; 16],
            run: false,
        };
        client.boot(spec, &attach)?;
        let (state, image) = (tempfile::tempfile_in(work)?, tempfile::tempfile_in(work)?);
        let mut attach = Attach::new();
        let spec = CutSpec {
            state: attach.add(&state),
            memory: attach.add(&image),
            extent: CutExtent::All,
            new_layers: Vec::new(),
            resume: false,
        };
        client.cut(spec, &attach)?;
        Ok(Self {
            shape,
            state,
            memory: image,
        })
    }

    /// The message and descriptors that turn a shell into a child.
    pub fn restore<'a>(
        &'a self,
        around: &'a Surroundings,
        generation: u128,
        run: bool,
        attach: &mut Attach<'a>,
    ) -> RestoreSpec {
        RestoreSpec {
            state: attach.add(&self.state),
            memory: MemoryImage {
                layers: vec![attach.add(&self.memory)],
                index: PageIndex::Identity,
            },
            disks: Vec::new(),
            net: NetSpec::default(),
            vsock: around.vsock(attach),
            console: around.console(attach),
            generation: generation.to_le_bytes(),
            prefault: None,
            run,
        }
    }
}

/// Starts a VMM without content.
pub fn shell(shape: Shape) -> anyhow::Result<Client> {
    let mut client = Client::start(&beside("forkd-vmm")?, &[])
        .context("forkd-vmm did not start: build it first with `make build`")?;
    client.prepare(shape)?;
    Ok(client)
}
