//! Drives one VMM by hand: `drive boot KERNEL INITRAMFS [key=value …]`.
//!
//! Keys: `vcpus`, `memory` (MiB), `cmdline` (added to the default), `cpu` (host or baseline), `disk` (raw
//! image, may be repeated), `vmm` (path of the program), `ready` (wait for the agent, then stop),
//! `cut` (directory to cut into once ready), `children` (to restore from the cut).

use std::error::Error;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forkd_types::{Engine, MiB};
use forkd_vmm_driver::{Attach, Client};
use forkd_vmm_proto::{
    BootSpec, ConsoleSpec, CpuModel, CutExtent, CutSpec, DiskSpec, Event, MemoryImage, NetSpec,
    PageIndex, RateLimit, RestoreSpec, Shape, VsockSpec,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Settings {
    kernel: PathBuf,
    initramfs: PathBuf,
    shape: Shape,
    cmdline: String,
    disks: Vec<PathBuf>,
    vmm: PathBuf,
    until_ready: bool,
    cut: Option<PathBuf>,
    children: usize,
}

fn settings() -> Result<Settings> {
    let mut args = std::env::args().skip(2);
    let mut next = |what| args.next().ok_or(what);
    let mut settings = Settings {
        kernel: next("no kernel")?.into(),
        initramfs: next("no initramfs")?.into(),
        shape: Shape {
            engine: Engine::FORKD,
            memory: MiB(256),
            vcpus: 1,
            cpu: CpuModel::Host,
        },
        cmdline: forkd_vmm_proto::LINUX_CMDLINE.to_owned(),
        disks: vec![],
        vmm: std::env::current_exe()?.with_file_name("forkd-vmm"),
        until_ready: false,
        cut: None,
        children: 1,
    };
    for arg in args {
        let (key, value) = arg.split_once('=').unwrap_or((&arg, ""));
        match key {
            "vcpus" => settings.shape.vcpus = value.parse()?,
            "memory" => settings.shape.memory = value.parse()?,
            "cpu" if value == "baseline" => settings.shape.cpu = CpuModel::Baseline,
            "cmdline" => settings.cmdline = format!("{} {value}", settings.cmdline),
            "only" => settings.cmdline = value.to_owned(),
            "disk" => settings.disks.push(value.into()),
            "vmm" => settings.vmm = value.into(),
            "ready" => settings.until_ready = true,
            "cut" => settings.cut = Some(value.into()),
            "children" => settings.children = value.parse()?,
            _ => return Err(format!("{key} is no setting").into()),
        }
    }
    Ok(settings)
}

struct Around {
    _dir: tempfile::TempDir,
    listener: OwnedFd,
    console: File,
}

impl Around {
    fn new() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let listener = UnixListener::bind(dir.path().join("vsock"))?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            _dir: dir,
            listener: listener.into(),
            console: tempfile::tempfile()?,
        })
    }

    fn specs<'a>(&'a self, attach: &mut Attach<'a>) -> (VsockSpec, ConsoleSpec) {
        let vsock = VsockSpec {
            cid: 3,
            listener: attach.add(&self.listener),
        };
        let console = ConsoleSpec {
            output: attach.add(&self.console),
            bytes_per_second: 0,
            max_bytes: 0,
        };
        (vsock, console)
    }

    fn print(&mut self) -> Result<()> {
        let mut text = Vec::new();
        self.console.rewind()?;
        self.console.read_to_end(&mut text)?;
        println!("{}", String::from_utf8_lossy(&text));
        Ok(())
    }
}

fn disk_specs<'a>(disks: &'a [File], attach: &mut Attach<'a>) -> Vec<DiskSpec> {
    disks
        .iter()
        .map(|disk| DiskSpec {
            base: attach.add(disk),
            layers: vec![],
            read_only: true,
            serial: "disk".into(),
            rate: RateLimit::default(),
        })
        .collect()
}

fn boot(settings: &Settings, around: &Around) -> Result<Client> {
    let mut vm = Client::start(&settings.vmm, &[])?;
    vm.set_timeout(Duration::from_secs(300));
    let t = Instant::now();
    vm.prepare(settings.shape)?;
    println!("prepared in {:?}", t.elapsed());
    let (kernel, initramfs) = (
        File::open(&settings.kernel)?,
        File::open(&settings.initramfs)?,
    );
    let disks = settings
        .disks
        .iter()
        .map(File::open)
        .collect::<std::io::Result<Vec<_>>>()?;
    let mut attach = Attach::new();
    let (vsock, console) = around.specs(&mut attach);
    let spec = BootSpec {
        kernel: attach.add(&kernel),
        initramfs: Some(attach.add(&initramfs)),
        cmdline: settings.cmdline.clone(),
        disks: disk_specs(&disks, &mut attach),
        net: NetSpec::default(),
        mac: [2, 0, 0, 0, 0, 1],
        vsock,
        console,
        generation: [7; 16],
        run: true,
    };
    let t = Instant::now();
    vm.boot(spec, &attach)?;
    println!("boot command took {:?}", t.elapsed());
    Ok(vm)
}

fn restore(settings: &Settings, dir: &Path, around: &Around, number: usize) -> Result<Client> {
    let mut vm = Client::start(&settings.vmm, &[])?;
    vm.prepare(settings.shape)?;
    let (state, memory) = (
        File::open(dir.join("state"))?,
        File::open(dir.join("memory"))?,
    );
    let disks = settings
        .disks
        .iter()
        .map(File::open)
        .collect::<std::io::Result<Vec<_>>>()?;
    let mut attach = Attach::new();
    let (vsock, console) = around.specs(&mut attach);
    let spec = RestoreSpec {
        state: attach.add(&state),
        memory: MemoryImage {
            layers: vec![attach.add(&memory)],
            index: PageIndex::Identity,
        },
        disks: disk_specs(&disks, &mut attach),
        net: NetSpec::default(),
        vsock,
        console,
        generation: [number as u8 + 8; 16],
        prefault: None,
        run: true,
    };
    let t = Instant::now();
    vm.restore(spec, &attach)?;
    println!("child {number} restored in {:?}", t.elapsed());
    Ok(vm)
}

fn cut(vm: &mut Client, dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir)?;
    let create = |name| {
        File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(dir.join(name))
    };
    let (state, memory) = (create("state")?, create("memory")?);
    let mut attach = Attach::new();
    let spec = CutSpec {
        state: attach.add(&state),
        memory: attach.add(&memory),
        extent: CutExtent::All,
        new_layers: vec![],
        resume: true,
    };
    println!("{:?}", vm.cut(spec, &attach)?);
    Ok(())
}

fn main() -> Result<()> {
    let settings = settings()?;
    let mut around = Around::new()?;
    let started = Instant::now();
    let mut vm = boot(&settings, &around)?;
    if let Some(dir) = &settings.cut {
        vm.wait_ready()?;
        println!("ready after {:?}", started.elapsed());
        cut(&mut vm, dir)?;
        for number in 0..settings.children {
            let mut around = Around::new()?;
            let mut child = restore(&settings, dir, &around, number)?;
            child.set_timeout(Duration::from_secs(6));
            let outcome = child.wait_event(|event, _| Some(event));
            println!("child {number}: {outcome:?}");
            child.stop()?;
            around.print()?;
        }
    } else if settings.until_ready {
        vm.wait_ready()?;
        println!("ready after {:?}", started.elapsed());
    } else {
        let cause = vm.wait_event(|event, _| match event {
            Event::Stopped { cause } => Some(Some(cause)),
            other => {
                println!("{other:?} after {:?}", started.elapsed());
                None
            }
        });
        println!("ended after {:?}: {cause:?}", started.elapsed());
        println!("exit status {:?}", vm.wait_exit()?);
        return around.print();
    }
    vm.stop()?;
    around.print()
}
