//! [`Kit`]: one `forkd-spawn`, one work folder, and the VMs made with them.
//!
//! Dropping the kit ends `forkd-spawn`, and with it every VM of the test.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use forkd_types::{Engine, MiB, SandboxId};
use forkd_vmm_link::{Endings, Spawner, Taken, Vmm};
use forkd_vmm_proto::spawn::{Jail, Limits};
use forkd_vmm_proto::{
    BootSpec, Command as VmmCommand, ConsoleSpec, CpuModel, ImageId, LINUX_CMDLINE, MemoryImage,
    NetAttachment, NetBackend, NetSpec, PageIndex, RateLimit, RestoreSpec, Shape, VsockSpec,
};
use tempfile::TempDir;

use crate::cut::Base;
use crate::ends::Ends;
use crate::vm::Parts;
use crate::{Assets, Disk, Fds, Frozen, Vm};

/// Lines of each console that a failed test shows.
const CONSOLE_LINES: usize = 40;

/// Upper bound on the size of a console file.
const CONSOLE_LIMIT: u64 = 16 << 20;

/// The root file system of a guest.
#[derive(Debug)]
pub enum Root {
    /// The root image with an empty layer over it.
    Fresh,
    /// A disk from an earlier VM.
    Disk(Disk),
    /// No disk: the guest stays in its initramfs.
    None,
}

/// Options of a boot. The default suits most tests.
#[derive(Debug)]
pub struct BootOptions {
    pub memory: MiB,
    pub vcpus: u8,
    pub cpu: CpuModel,
    /// The kernel; the uncompressed one by default.
    pub kernel: Option<PathBuf>,
    /// Words to append to the default kernel command line.
    pub cmdline: String,
    pub root: Root,
    /// Disks after the root disk.
    pub disks: Vec<Disk>,
    /// Network back end and its descriptor.
    pub net: Option<(NetBackend, OwnedFd)>,
    /// Upper bound on console bytes per second; 0 for no limit.
    pub console_rate: u64,
    /// Upper bound on the size of the console file.
    pub console_limit: u64,
}

impl Default for BootOptions {
    fn default() -> Self {
        Self {
            memory: MiB(256),
            vcpus: 1,
            cpu: CpuModel::Host,
            kernel: None,
            cmdline: String::new(),
            root: Root::Fresh,
            disks: Vec::new(),
            net: None,
            console_rate: 0,
            console_limit: CONSOLE_LIMIT,
        }
    }
}

/// Options of a restore. The default suits most tests.
#[derive(Debug)]
pub struct ForkOptions {
    /// Network back end and its descriptor. Required if and only if the parent had one.
    pub net: Option<(NetBackend, OwnedFd)>,
    pub generation: [u8; 16],
    /// A file of [`Vm::working_set`]: pages to make present before the child runs.
    pub prefault: Option<PathBuf>,
    /// Whether the vCPUs run at once.
    pub run: bool,
}

impl Default for ForkOptions {
    fn default() -> Self {
        Self {
            net: None,
            generation: rand::random(),
            prefault: None,
            run: true,
        }
    }
}

/// A new work folder. Dropping it removes the folder.
pub fn work_folder() -> std::io::Result<TempDir> {
    let parent = std::env::var_os("FORKD_E2E_WORK").map_or(std::env::temp_dir(), PathBuf::from);
    tempfile::Builder::new()
        .prefix("forkd-e2e-")
        .tempdir_in(parent)
}

/// The last lines of all consoles below a work folder, for a failed test.
pub fn last_of_consoles(work: &Path) -> String {
    let mut all = String::new();
    let folders = std::fs::read_dir(work).into_iter().flatten().flatten();
    for folder in folders.map(|entry| entry.path()) {
        let text = std::fs::read(folder.join("console.log")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        let last = lines.len().saturating_sub(CONSOLE_LINES);
        if !lines.is_empty() {
            all += &format!("\nconsole of {}:\n", folder.display());
            all += &lines[last..].join("\n");
        }
    }
    all
}

/// One `forkd-spawn` in a work folder. It ends with the kit.
#[derive(Debug)]
pub struct Kit {
    pub assets: Assets,
    /// The connection to `forkd-spawn`.
    pub spawner: Spawner,
    ends: Arc<Ends>,
    process: Child,
    work: PathBuf,
    next: AtomicU64,
}

impl Kit {
    /// Starts `forkd-spawn` in an empty folder.
    pub async fn start(work: &Path) -> anyhow::Result<Self> {
        let assets = Assets::from_env()?;
        let socket = work.join("spawn.sock");
        let process = start_spawner(&assets, &socket)?;
        let (spawner, endings) = connect(&socket).await?;
        Ok(Self {
            assets,
            spawner,
            ends: Ends::watch(endings),
            process,
            work: work.to_owned(),
            next: AtomicU64::new(1),
        })
    }

    /// Reconnects to `forkd-spawn`, as a restarted daemon does.
    pub async fn reconnect(&mut self) -> anyhow::Result<()> {
        let (spawner, endings) = connect(&self.work.join("spawn.sock")).await?;
        self.spawner = spawner;
        self.ends = Ends::watch(endings);
        Ok(())
    }

    pub fn work(&self) -> &Path {
        &self.work
    }

    pub fn spawner_pid(&self) -> u32 {
        self.process.id()
    }

    /// Kills `forkd-spawn` and waits for its end.
    pub fn kill_spawner(&mut self) -> anyhow::Result<()> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }

    /// Starts another `forkd-spawn` after [`Self::kill_spawner`]. The machines of the old one are gone.
    pub async fn restart_spawner(&mut self) -> anyhow::Result<()> {
        self.process = start_spawner(&self.assets, &self.work.join("spawn.sock"))?;
        self.reconnect().await
    }

    /// A new folder below the work folder.
    pub fn folder(&self, name: &str) -> anyhow::Result<PathBuf> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = self.work.join(format!("{name}-{number}"));
        std::fs::create_dir(&path)?;
        Ok(path)
    }

    /// An ID that no other VM has.
    pub fn fresh_id(&self) -> SandboxId {
        SandboxId::from_parts(1, rand::random())
    }

    /// Takes a shell from `forkd-spawn`.
    pub async fn shell(&self, shape: Shape) -> anyhow::Result<Taken> {
        let id = self.fresh_id();
        let mut taken = self
            .spawner
            .take(
                shape,
                std::slice::from_ref(&id),
                &Limits::default(),
                Jail::default(),
            )
            .await?;
        taken.pop().context("the shell died")
    }

    /// Boots a VM and waits until its agent has answered.
    pub async fn boot(&self, options: BootOptions) -> anyhow::Result<Vm> {
        let vm = self.boot_without_agent(options).await?;
        vm.wait_ready().await?;
        Ok(vm)
    }

    /// Boots a VM without waiting for its agent.
    pub async fn boot_without_agent(&self, options: BootOptions) -> anyhow::Result<Vm> {
        let shape = Shape {
            engine: Engine::FORKD,
            memory: options.memory,
            vcpus: options.vcpus,
            cpu: options.cpu,
        };
        let vm = self.empty(shape).await?;
        let folder = vm.folder();
        let mut fds = Fds::default();
        let kernel = options.kernel.as_deref().unwrap_or(&self.assets.vmlinux);
        let mut disks = Vec::new();
        match options.root {
            Root::Fresh => {
                disks.push(Disk::over(&self.assets.image, "root").with_new_layer(folder)?);
            }
            Root::Disk(disk) => disks.push(disk),
            Root::None => {}
        }
        disks.extend(options.disks);
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
            net: net_spec(&mut fds, options.net),
            mac: mac(),
            vsock: vsock(&mut fds, folder)?,
            console: console(
                &mut fds,
                folder,
                options.console_rate,
                options.console_limit,
            )?,
            generation: rand::random(),
            run: true,
        };
        let command = VmmCommand::Boot(Box::new(spec));
        vm.vmm.run(command, &fds.borrow()).await?;
        vm.filled(disks).await;
        Ok(vm)
    }

    /// Starts a child. Its agent has not been contacted yet.
    pub async fn fork(&self, frozen: &Frozen) -> anyhow::Result<Vm> {
        self.fork_with(frozen, ForkOptions::default()).await
    }

    /// Starts a child and gives it an identity.
    pub async fn fork_named(&self, frozen: &Frozen, hostname: &str) -> anyhow::Result<Vm> {
        let vm = self.fork(frozen).await?;
        vm.answers().await?;
        vm.identify(hostname, None).await?;
        Ok(vm)
    }

    /// Starts a child in a new shell.
    pub async fn fork_with(&self, frozen: &Frozen, options: ForkOptions) -> anyhow::Result<Vm> {
        let vm = self.empty(frozen.shape).await?;
        self.restore(&vm, frozen, options).await?;
        Ok(vm)
    }

    /// A shell without content.
    pub async fn empty(&self, shape: Shape) -> anyhow::Result<Vm> {
        let taken = self.shell(shape).await?;
        let (vmm, events) = Vmm::new(taken.control, 0, taken.vm.capabilities)?;
        Vm::new(Parts {
            process: taken.vm,
            vmm,
            events,
            ends: Arc::clone(&self.ends),
            folder: self.folder("vm")?,
        })
    }

    /// Restores a frozen VM in a shell. A shell that refuses can be used again.
    pub async fn restore(
        &self,
        vm: &Vm,
        frozen: &Frozen,
        options: ForkOptions,
    ) -> anyhow::Result<()> {
        let layers = self.folder("layers")?;
        let mut fds = Fds::default();
        let disks: Vec<Disk> = frozen
            .disks
            .iter()
            .map(|disk| {
                if disk.read_only {
                    Ok(disk.clone())
                } else {
                    disk.with_new_layer(&layers)
                }
            })
            .collect::<Result<_, _>>()?;
        let spec = RestoreSpec {
            state: fds.add(File::open(&frozen.state)?),
            memory: memory(frozen, &mut fds)?,
            disks: disks
                .iter()
                .map(|disk| disk.spec(&mut fds))
                .collect::<Result<_, _>>()?,
            net: net_spec(&mut fds, options.net),
            vsock: vsock(&mut fds, vm.folder())?,
            console: console(&mut fds, vm.folder(), 0, CONSOLE_LIMIT)?,
            generation: options.generation,
            prefault: match &options.prefault {
                Some(path) => Some(fds.add(File::open(path)?)),
                None => None,
            },
            run: options.run,
        };
        let command = VmmCommand::Restore(Box::new(spec));
        if let Err(error) = vm.vmm.run(command, &fds.borrow()).await {
            std::fs::remove_dir_all(&layers)?;
            return Err(error.into());
        }
        vm.filled(disks).await;
        *vm.base().await = Some(Base {
            frozen: frozen.clone(),
            image: ImageId::START,
        });
        Ok(())
    }

    /// Adopts VMs that an earlier connection started.
    pub async fn adopt(&self, folder: &Path, epoch: u32) -> anyhow::Result<Vec<Vm>> {
        let mut vms = Vec::new();
        for taken in self.spawner.adopt().await? {
            let (vmm, events) = Vmm::new(taken.control, epoch, taken.vm.capabilities)?;
            vms.push(Vm::new(Parts {
                process: taken.vm,
                vmm,
                events,
                ends: Arc::clone(&self.ends),
                folder: folder.to_owned(),
            })?);
        }
        Ok(vms)
    }
}

impl Drop for Kit {
    fn drop(&mut self) {
        // Both calls fail only if the process has ended already. Its VMMs end when its sockets close.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn start_spawner(assets: &Assets, socket: &Path) -> anyhow::Result<Child> {
    Command::new(assets.program("forkd-spawn"))
        .arg("--socket")
        .arg(socket)
        .spawn()
        .context("forkd-spawn did not start")
}

async fn connect(socket: &Path) -> anyhow::Result<(Spawner, Endings)> {
    for _ in 0..500 {
        match Spawner::connect(socket).await {
            Ok(connected) => return Ok(connected),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
    bail!("forkd-spawn does not listen on {}", socket.display())
}

fn memory(frozen: &Frozen, fds: &mut Fds) -> anyhow::Result<MemoryImage> {
    let layers = frozen.layers();
    Ok(MemoryImage {
        layers: layers
            .iter()
            .map(|path| Ok(fds.add(File::open(path)?)))
            .collect::<anyhow::Result<_>>()?,
        index: match &frozen.index {
            Some(index) => PageIndex::File(fds.add(File::open(index)?)),
            None => PageIndex::Identity,
        },
    })
}

fn vsock(fds: &mut Fds, folder: &Path) -> anyhow::Result<VsockSpec> {
    let path = folder.join("vsock.sock");
    if path.exists() {
        std::fs::remove_file(&path)?;
    }
    let listener = UnixListener::bind(path)?;
    Ok(VsockSpec {
        cid: 3,
        listener: fds.add(listener),
    })
}

fn console(fds: &mut Fds, folder: &Path, rate: u64, limit: u64) -> anyhow::Result<ConsoleSpec> {
    let output = File::create(folder.join("console.log"))?;
    Ok(ConsoleSpec {
        output: fds.add(output),
        bytes_per_second: rate,
        max_bytes: limit,
    })
}

fn mac() -> [u8; 6] {
    let random: [u8; 5] = rand::random();
    [0x02, random[0], random[1], random[2], random[3], random[4]]
}

fn net_spec(fds: &mut Fds, backend: Option<(NetBackend, OwnedFd)>) -> NetSpec {
    NetSpec {
        backend: backend.map(|(kind, fd)| NetAttachment {
            fd: fds.add(fd),
            kind,
        }),
        rate: RateLimit::default(),
    }
}
