//! A guest of a few bytes, frozen before its first instruction.

use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::Path;

use anyhow::Context;
use forkd_types::MiB;
use forkd_vmm_driver::{Attach, Client};
use forkd_vmm_proto::{
    BootSpec, ConsoleSpec, CpuModel, CutSpec, MemoryImage, PageIndex, RestoreSpec, Shape, VsockSpec,
};

use crate::spawned::beside;

/// What children are started from.
#[derive(Debug)]
pub struct Frozen {
    /// What their shells must look like.
    pub shape: Shape,
    state: File,
    memory: File,
}

/// What the controller makes for each machine: a console and a socket.
#[derive(Debug)]
pub struct Surroundings {
    console: File,
    listener: UnixListener,
}

impl Surroundings {
    /// Files in a folder, told apart by a number.
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
    /// Loads a program as the kernel, and freezes the machine there.
    pub fn new(work: &Path, memory: MiB, program: &[u8]) -> anyhow::Result<Self> {
        let shape = Shape {
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
            net: None,
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
            only_changed: false,
            onto: 0,
            index: None,
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

    /// How a shell becomes a child.
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
            net: None,
            vsock: around.vsock(attach),
            console: around.console(attach),
            generation: generation.to_le_bytes(),
            prefault: None,
            run,
        }
    }
}

/// A VMM of our own with nothing in it.
pub fn shell(shape: Shape) -> anyhow::Result<Client> {
    let mut client = Client::start(&beside("forkd-vmm")?, &[])
        .context("forkd-vmm did not start: build it first with `make build`")?;
    client.prepare(shape)?;
    Ok(client)
}
