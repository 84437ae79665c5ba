//! The kit: one `forkd-spawn`, one work folder, and VMs made with them.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use forkd_types::{MiB, SandboxId};
use forkd_vmm_client::{Spawner, Taken, Vmm};
use forkd_vmm_proto::{
    BootSpec, Command as VmmCommand, ConsoleSpec, CpuModel, LINUX_CMDLINE, MemoryImage, NetBackend,
    NetSpec, PageIndex, RateLimit, RestoreSpec, Shape, VsockSpec,
};
use tempfile::TempDir;

use crate::{Assets, Disk, Fds, Frozen, Vm};

/// The most bytes a guest's console may fill.
const CONSOLE_LIMIT: u64 = 16 << 20;

/// How a VM is booted. The default is the machine most tests want.
#[derive(Debug)]
pub struct BootOptions {
    /// Memory.
    pub memory: MiB,
    /// vCPUs.
    pub vcpus: u8,
    /// CPU features.
    pub cpu: CpuModel,
    /// Kernel; the uncompressed one by default.
    pub kernel: Option<PathBuf>,
    /// Appended to the default kernel command line.
    pub cmdline: String,
    /// Boot the root image; without it the guest lives in its initramfs.
    pub root: bool,
    /// Disks after the root disk.
    pub disks: Vec<Disk>,
    /// A descriptor that carries frames.
    pub net: Option<(NetBackend, OwnedFd)>,
}

impl Default for BootOptions {
    fn default() -> Self {
        Self {
            memory: MiB(256),
            vcpus: 1,
            cpu: CpuModel::Host,
            kernel: None,
            cmdline: String::new(),
            root: true,
            disks: Vec::new(),
            net: None,
        }
    }
}

/// One `forkd-spawn` and a work folder; both end with the kit.
#[derive(Debug)]
pub struct Kit {
    /// What guests are made of.
    pub assets: Assets,
    /// The connection to `forkd-spawn`.
    pub spawner: Spawner,
    process: Child,
    work: TempDir,
    next: AtomicU64,
}

impl Kit {
    /// Starts `forkd-spawn` in a fresh folder.
    pub async fn start() -> anyhow::Result<Self> {
        let assets = Assets::from_env()?;
        let parent = std::env::var_os("FORKD_E2E_WORK").map_or(std::env::temp_dir(), PathBuf::from);
        let work = tempfile::Builder::new()
            .prefix("forkd-e2e-")
            .tempdir_in(parent)?;
        let socket = work.path().join("spawn.sock");
        let process = Command::new(assets.program("forkd-spawn"))
            .arg("--socket")
            .arg(&socket)
            .spawn()
            .context("forkd-spawn did not start")?;
        let spawner = connect(&socket).await?;
        Ok(Self {
            assets,
            spawner,
            process,
            work,
            next: AtomicU64::new(1),
        })
    }

    /// The work folder, on a real disk.
    pub fn work(&self) -> &Path {
        self.work.path()
    }

    /// The process id of `forkd-spawn`.
    pub fn spawner_pid(&self) -> u32 {
        self.process.id()
    }

    /// A fresh folder below the work folder.
    pub fn folder(&self, name: &str) -> anyhow::Result<PathBuf> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = self.work.path().join(format!("{name}-{number}"));
        std::fs::create_dir(&path)?;
        Ok(path)
    }

    /// An id no other VM has.
    pub fn fresh_id(&self) -> SandboxId {
        SandboxId::from_parts(1, rand::random())
    }

    /// Takes a shell.
    pub async fn shell(&self, shape: Shape) -> anyhow::Result<Taken> {
        let id = self.fresh_id();
        let mut taken = self.spawner.take(shape, std::slice::from_ref(&id)).await?;
        taken.pop().context("the shell died")
    }

    /// Boots a VM and waits until its agent has answered.
    pub async fn boot(&self, options: BootOptions) -> anyhow::Result<Vm> {
        let vm = self.boot_without_agent(options).await?;
        vm.wait_ready().await?;
        Ok(vm)
    }

    /// Boots a VM and waits for nothing.
    pub async fn boot_without_agent(&self, options: BootOptions) -> anyhow::Result<Vm> {
        let shape = Shape {
            memory: options.memory,
            vcpus: options.vcpus,
            cpu: options.cpu,
        };
        let taken = self.shell(shape).await?;
        let folder = self.folder("vm")?;
        let mut fds = Fds::default();
        let kernel = options.kernel.as_deref().unwrap_or(&self.assets.vmlinux);
        let mut disks = Vec::new();
        if options.root {
            disks.push(Disk::over(&self.assets.image, "root").with_new_layer(&folder)?);
        }
        disks.extend(options.disks);
        let has_net = options.net.is_some();
        let spec = BootSpec {
            kernel: fds.add(File::open(kernel)?),
            initramfs: Some(fds.add(File::open(&self.assets.initramfs)?)),
            cmdline: format!("{LINUX_CMDLINE} {}", options.cmdline)
                .trim()
                .to_owned(),
            disks: disks
                .iter()
                .map(|disk| disk.spec(&mut fds))
                .collect::<Result<_, _>>()?,
            net: options.net.map(|(kind, fd)| net_spec(&mut fds, kind, fd)),
            vsock: vsock(&mut fds, &folder)?,
            console: console(&mut fds, &folder)?,
            generation: rand::random(),
            run: true,
        };
        let (vmm, events) = Vmm::new(taken.control, 0)?;
        vmm.run(VmmCommand::Boot(Box::new(spec)), &fds.borrow())
            .await?;
        Ok(Vm::new(taken.vm, vmm, events, folder, disks, has_net))
    }

    /// Starts a child from a frozen machine; its agent has not been asked anything yet.
    pub async fn fork(&self, frozen: &Frozen) -> anyhow::Result<Vm> {
        let taken = self.shell(frozen.shape).await?;
        self.fork_into(frozen, taken, None).await
    }

    /// Starts a child in a shell that was taken before.
    pub async fn fork_into(
        &self,
        frozen: &Frozen,
        taken: Taken,
        net: Option<(NetBackend, OwnedFd)>,
    ) -> anyhow::Result<Vm> {
        let folder = self.folder("child")?;
        let mut fds = Fds::default();
        let disks: Vec<Disk> = frozen
            .disks
            .iter()
            .map(|disk| {
                if disk.read_only {
                    Ok(disk.clone())
                } else {
                    disk.with_new_layer(&folder)
                }
            })
            .collect::<Result<_, _>>()?;
        let has_net = net.is_some();
        let spec = RestoreSpec {
            state: fds.add(File::open(&frozen.state)?),
            memory: MemoryImage {
                layers: vec![fds.add(File::open(&frozen.memory)?)],
                index: PageIndex::Identity,
            },
            disks: disks
                .iter()
                .map(|disk| disk.spec(&mut fds))
                .collect::<Result<_, _>>()?,
            net: net.map(|(kind, fd)| net_spec(&mut fds, kind, fd)),
            vsock: vsock(&mut fds, &folder)?,
            console: console(&mut fds, &folder)?,
            generation: rand::random(),
            prefault: None,
            run: true,
        };
        let (vmm, events) = Vmm::new(taken.control, 0)?;
        vmm.run(VmmCommand::Restore(Box::new(spec)), &fds.borrow())
            .await?;
        Ok(Vm::new(taken.vm, vmm, events, folder, disks, has_net))
    }
}

impl Drop for Kit {
    fn drop(&mut self) {
        // Both fail only when it has ended already; its VMMs end when its sockets close.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

async fn connect(socket: &Path) -> anyhow::Result<Spawner> {
    for _ in 0..500 {
        match Spawner::connect(socket).await {
            Ok((spawner, _)) => return Ok(spawner),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
    bail!("forkd-spawn does not listen on {}", socket.display())
}

fn vsock(fds: &mut Fds, folder: &Path) -> anyhow::Result<VsockSpec> {
    let listener = UnixListener::bind(folder.join("vsock.sock"))?;
    Ok(VsockSpec {
        cid: 3,
        listener: fds.add(listener),
    })
}

fn console(fds: &mut Fds, folder: &Path) -> anyhow::Result<ConsoleSpec> {
    let output = File::create(folder.join("console.log"))?;
    Ok(ConsoleSpec {
        output: fds.add(output),
        bytes_per_second: 0,
        max_bytes: CONSOLE_LIMIT,
    })
}

fn net_spec(fds: &mut Fds, kind: NetBackend, fd: OwnedFd) -> NetSpec {
    let random: [u8; 5] = rand::random();
    let mac = [0x02, random[0], random[1], random[2], random[3], random[4]];
    NetSpec {
        backend: fds.add(fd),
        kind,
        mac,
        rate: RateLimit::default(),
    }
}
