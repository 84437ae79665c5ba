//! The program `forkd-fc` over its control socket, against a stand-in for Firecracker.
//!
//! With `FORKD_TEST_FIRECRACKER` the tests of a VM that works run against that program. They then need
//! `FORKD_TEST_KERNEL`, `FORKD_TEST_INITRAMFS` and `FORKD_TEST_DISK` for a guest whose agent reports that it is ready, and
//! a KVM that works. Faults are always those of the stand-in.

mod stand_in;

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use forkd_formats::layer::LayerHeader;
use forkd_types::{Engine, MiB};
use forkd_vmm_driver::{Attach, Client, ClientError};
use forkd_vmm_proto::{
    BootSpec, Command, ConsoleSpec, CpuModel, CutExtent, CutReport, CutSpec, DiskSpec, Event,
    LINUX_CMDLINE, MemoryImage, NetSpec, PageIndex, PrepareSpec, RateLimit, Reply, RestoreSpec,
    RollbackSpec, Shape, StopCause, VmmErrorCode, VmmPhase, VsockSpec,
};

#[test]
fn the_stand_in_serves() {
    stand_in::serve_if_asked();
}

const MEMORY: MiB = MiB(256);

/// The files of a guest.
struct Guest {
    kernel: File,
    initramfs: File,
    disk: File,
    /// There is a real guest, with a real console and a real agent.
    real: bool,
}

impl Guest {
    fn find() -> Self {
        if let Some(kernel) = std::env::var_os("FORKD_TEST_KERNEL")
            && real_firecracker().is_some()
        {
            let open = |name: &str| File::open(std::env::var_os(name).unwrap()).unwrap();
            return Self {
                kernel: File::open(kernel).unwrap(),
                initramfs: open("FORKD_TEST_INITRAMFS"),
                disk: open("FORKD_TEST_DISK"),
                real: true,
            };
        }
        let file = |text: &[u8]| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(text).unwrap();
            file
        };
        let disk = file(b"the root disk");
        disk.set_len(1 << 20).unwrap();
        Self {
            kernel: file(b"a kernel"),
            initramfs: file(b"an initramfs"),
            disk,
            real: false,
        }
    }

    fn layer(&self) -> File {
        let header = LayerHeader::new(self.disk.metadata().unwrap().len(), 0).unwrap();
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&header.encode(), 0).unwrap();
        file.set_len(header.file_len()).unwrap();
        file
    }
}

fn real_firecracker() -> Option<PathBuf> {
    std::env::var_os("FORKD_TEST_FIRECRACKER").map(PathBuf::from)
}

/// The adapter in a folder of its own, with the sockets and files that the daemon gives it.
struct Vm {
    client: Client,
    dir: tempfile::TempDir,
    listener: UnixListener,
    console: File,
}

impl Vm {
    fn start(fault: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let program = match real_firecracker() {
            Some(program) if fault.is_empty() => program,
            _ => stand_in::script(dir.path(), fault),
        };
        let folder = dir.path().join("vm");
        std::fs::create_dir(&folder).unwrap();
        let listener = UnixListener::bind(dir.path().join("guest.sock")).unwrap();
        let args = ["--firecracker", program.to_str().unwrap(), "--dir"];
        let args = [&args[..], &[folder.to_str().unwrap()]].concat();
        let adapter = PathBuf::from(env!("CARGO_BIN_EXE_forkd-fc"));
        Self {
            client: Client::start(&adapter, &args).unwrap(),
            dir,
            listener,
            console: tempfile::tempfile().unwrap(),
        }
    }

    fn prepared(fault: &str) -> Self {
        let mut vm = Self::start(fault);
        vm.prepare(shape()).unwrap();
        vm
    }

    fn prepare(&mut self, shape: Shape) -> Result<Reply, ClientError> {
        let kvm = File::open("/dev/null").unwrap();
        let mut attach = Attach::new();
        let spec = PrepareSpec {
            shape,
            kvm: attach.add(&kvm),
            pagemap: None,
            jail: None,
        };
        self.client.ask(Command::Prepare(spec), &attach)
    }

    fn boot(&mut self, guest: &Guest, top: &File) -> Result<Reply, ClientError> {
        let mut attach = Attach::new();
        let spec = BootSpec {
            kernel: attach.add(&guest.kernel),
            initramfs: Some(attach.add(&guest.initramfs)),
            cmdline: LINUX_CMDLINE.to_owned(),
            disks: vec![disk(&mut attach, guest, &[top])],
            net: NetSpec::default(),
            mac: [2, 0, 0, 0, 0, 1],
            vsock: vsock(&mut attach, &self.listener),
            console: console(&mut attach, &self.console),
            generation: [1; 16],
            run: true,
        };
        self.client.ask(Command::Boot(Box::new(spec)), &attach)
    }

    fn restore(&mut self, guest: &Guest, cut: &Cut, top: &File) -> Result<Reply, ClientError> {
        let mut attach = Attach::new();
        let spec = RestoreSpec {
            state: attach.add(&cut.state),
            memory: MemoryImage {
                layers: vec![attach.add(&cut.memory)],
                index: PageIndex::Identity,
            },
            disks: vec![disk(&mut attach, guest, &[&cut.layer, top])],
            net: NetSpec::default(),
            vsock: vsock(&mut attach, &self.listener),
            console: console(&mut attach, &self.console),
            generation: [2; 16],
            prefault: None,
            run: true,
        };
        self.client.ask(Command::Restore(Box::new(spec)), &attach)
    }

    /// Cuts the VM. `top` is the layer that the VM has used so far.
    fn cut(&mut self, guest: &Guest, top: File, resume: bool) -> Result<(Cut, File), ClientError> {
        let (state, memory) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let next = guest.layer();
        let mut attach = Attach::new();
        let spec = CutSpec {
            state: attach.add(&state),
            memory: attach.add(&memory),
            extent: CutExtent::All,
            new_layers: vec![attach.add(&next)],
            resume,
        };
        match self.client.ask(Command::Cut(spec), &attach)? {
            Reply::Cut(report) => {
                let cut = Cut {
                    state,
                    memory,
                    layer: top,
                    report,
                };
                Ok((cut, next))
            }
            _ => Err(ClientError::Unexpected),
        }
    }

    fn ask(&mut self, command: Command) -> Result<Reply, ClientError> {
        self.client.ask(command, &Attach::new())
    }

    fn phase(&mut self) -> VmmPhase {
        match self.ask(Command::Status).unwrap() {
            Reply::Status(status) => status.phase,
            reply => panic!("{reply:?}"),
        }
    }

    /// Connects to the agent's port in the guest, and answers its first line.
    fn dial(&self) -> (BufReader<UnixStream>, String) {
        let mut stream = UnixStream::connect(self.dir.path().join("guest.sock")).unwrap();
        stream.write_all(b"CONNECT 1024\n").unwrap();
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        (stream, line)
    }

    /// The names of the files that the VM left in its folder.
    fn files(&self) -> Vec<String> {
        let names = std::fs::read_dir(self.dir.path().join("vm")).unwrap();
        let mut names: Vec<String> = names
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

/// A cut, with the layer that it froze.
struct Cut {
    state: File,
    memory: File,
    layer: File,
    report: CutReport,
}

fn shape() -> Shape {
    Shape {
        engine: Engine::FIRECRACKER,
        memory: MEMORY,
        vcpus: 1,
        cpu: CpuModel::Host,
    }
}

fn disk<'a>(attach: &mut Attach<'a>, guest: &'a Guest, layers: &[&'a File]) -> DiskSpec {
    DiskSpec {
        base: attach.add(&guest.disk),
        layers: layers.iter().map(|layer| attach.add(*layer)).collect(),
        read_only: false,
        serial: "root".to_owned(),
        rate: RateLimit::default(),
    }
}

fn vsock<'a>(attach: &mut Attach<'a>, listener: &'a impl AsFd) -> VsockSpec {
    VsockSpec {
        cid: 3,
        listener: attach.add(listener),
    }
}

fn console<'a>(attach: &mut Attach<'a>, file: &'a File) -> ConsoleSpec {
    ConsoleSpec {
        output: attach.add(file),
        bytes_per_second: 0,
        max_bytes: 0,
    }
}

fn code(result: Result<impl std::fmt::Debug, ClientError>) -> (VmmErrorCode, String) {
    match result {
        Err(ClientError::Refused(error)) => (error.code, error.message),
        other => panic!("{other:?}"),
    }
}

/// Reads the whole file: other owners of the descriptor share its position.
fn text(file: &File) -> String {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The text that the stand-in appends to at each start.
fn written(guest: &Guest, layers: &[&File]) -> String {
    let flat = tempfile::tempfile().unwrap();
    let layers: Vec<File> = layers.iter().map(|f| f.try_clone().unwrap()).collect();
    forkd_fc::FlatDisk::make(
        flat.try_clone().unwrap(),
        guest.disk.try_clone().unwrap(),
        layers,
        true,
    )
    .unwrap();
    let mut block = [0; 64];
    flat.read_exact_at(&mut block, 4096).unwrap();
    let used = block.iter().take_while(|byte| **byte != 0).count();
    String::from_utf8_lossy(&block[..used]).into_owned()
}

#[test]
fn a_vm_boots_is_cut_and_its_children_start_from_the_cut() {
    let guest = Guest::find();
    let mut parent = Vm::prepared("");
    let top = guest.layer();
    parent.boot(&guest, &top).unwrap();
    parent.client.wait_ready().unwrap();
    assert_eq!(parent.phase(), VmmPhase::Running);
    assert!(parent.dial().1.starts_with("OK "));
    assert!(
        !parent
            .files()
            .iter()
            .any(|name| name == "disk0" || name == "kernel")
    );
    let (first, top) = parent.cut(&guest, top, true).unwrap();
    assert!(first.report.pause_us > 0);
    assert!(first.report.pages_written > 0 && first.report.zero_pages > 0);
    assert_eq!(parent.phase(), VmmPhase::Running);
    let (second, _) = parent.cut(&guest, top, false).unwrap();
    assert_eq!(parent.phase(), VmmPhase::Paused);
    assert_ne!(first.report.image, second.report.image);
    assert!(!parent.files().iter().any(|name| name.ends_with(".new")));
    parent.ask(Command::Stop).unwrap();
    for _ in 0..2 {
        let mut child = Vm::prepared("");
        let top = guest.layer();
        child.restore(&guest, &first, &top).unwrap();
        assert_eq!(child.phase(), VmmPhase::Running);
        let (mut stream, line) = child.dial();
        assert!(line.starts_with("OK "), "{line}");
        if !guest.real {
            stream.get_mut().write_all(b"ping").unwrap();
            let mut echo = [0; 4];
            stream.read_exact(&mut echo).unwrap();
            assert_eq!(&echo, b"ping");
            let (cut, _) = child.cut(&guest, top, true).unwrap();
            let disk = written(&guest, &[&first.layer, &cut.layer]);
            assert_eq!(disk, "booted restored");
        }
    }
    if !guest.real {
        assert_eq!(written(&guest, &[&first.layer]), "booted");
        assert!(text(&parent.console).contains("the guest boots"));
    }
}

#[test]
fn a_vm_pauses_and_resumes_as_often_as_it_is_asked() {
    let guest = Guest::find();
    let mut vm = Vm::prepared("slow at /vm");
    vm.boot(&guest, &guest.layer()).unwrap();
    for (command, phase) in [
        (Command::Pause, VmmPhase::Paused),
        (Command::Pause, VmmPhase::Paused),
        (Command::Resume, VmmPhase::Running),
        (Command::Resume, VmmPhase::Running),
    ] {
        vm.ask(command).unwrap();
        assert_eq!(vm.phase(), phase);
    }
}

#[test]
fn operations_that_the_engine_lacks_are_refused() {
    let guest = Guest::find();
    let mut vm = Vm::prepared("");
    let top = guest.layer();
    vm.boot(&guest, &top).unwrap();
    let rollback = RollbackSpec {
        to: 1,
        new_layers: Vec::new(),
        generation: [0; 16],
    };
    for command in [
        Command::Rollback(rollback),
        Command::SetNet { backend: None },
        Command::Balloon { target_mib: 1 },
    ] {
        let (code, message) = code(vm.ask(command));
        assert_eq!(code, VmmErrorCode::Unsupported);
        assert!(
            message.starts_with("the engine firecracker lacks"),
            "{message}"
        );
    }
    assert_eq!(vm.phase(), VmmPhase::Running);
    let mut other = Vm::start("");
    let forkd = Shape {
        engine: Engine::FORKD,
        ..shape()
    };
    assert_eq!(code(other.prepare(forkd)).0, VmmErrorCode::BadRequest);
    assert_eq!(code(vm.boot(&guest, &top)).0, VmmErrorCode::WrongPhase);
}

#[test]
fn a_firecracker_that_does_not_boot_is_reported_with_its_reason() {
    let guest = Guest::find();
    let boot = |fault: &str| code(Vm::prepared(fault).boot(&guest, &guest.layer()));
    let (refused, message) = boot("refuses at /actions");
    assert_eq!(refused, VmmErrorCode::BadKernel);
    assert!(message.contains("the stand-in refuses"), "{message}");
    for (fault, reason) in [
        ("dies at start", "Firecracker ended at once: exit status: 3"),
        ("dies at /actions", "closed the connection"),
        ("garbage at /boot-source", "invalid HTTP"),
        ("endless at /machine-config", "invalid HTTP"),
    ] {
        let (code, message) = boot(fault);
        assert_eq!(code, VmmErrorCode::Io, "{fault}");
        assert!(message.contains(reason), "{fault}: {message}");
    }
    let mut used_up = Vm::prepared("refuses at /actions");
    assert!(used_up.boot(&guest, &guest.layer()).is_err());
    let again = code(used_up.boot(&guest, &guest.layer()));
    assert_eq!(again.0, VmmErrorCode::WrongPhase);
}

#[test]
fn a_cut_that_fails_leaves_the_vm_running() {
    let guest = Guest::find();
    let mut vm = Vm::prepared("refuses at /snapshot/create");
    let top = guest.layer();
    vm.boot(&guest, &top).unwrap();
    for resume in [true, false] {
        let top = top.try_clone().unwrap();
        let (code, message) = code(vm.cut(&guest, top, resume).map(|_| ()));
        assert_eq!(code, VmmErrorCode::Io);
        assert!(message.contains("the stand-in refuses"), "{message}");
        assert_eq!(vm.phase(), VmmPhase::Running);
    }
}

#[test]
fn a_snapshot_that_is_none_is_refused() {
    let guest = Guest::find();
    let mut state = tempfile::tempfile().unwrap();
    state.write_all(b"no state").unwrap();
    let cut = Cut {
        state,
        memory: tempfile::tempfile().unwrap(),
        layer: guest.layer(),
        report: CutReport::default(),
    };
    let mut vm = Vm::prepared("");
    let (code, _) = code(vm.restore(&guest, &cut, &guest.layer()));
    assert_eq!(code, VmmErrorCode::BadSnapshot);
}

#[test]
fn the_end_of_firecracker_is_the_end_of_the_vm() {
    let guest = Guest::find();
    let mut vm = Vm::prepared("dies at /vm");
    vm.boot(&guest, &guest.layer()).unwrap();
    assert!(vm.ask(Command::Pause).is_err());
    let cause = vm.client.wait_event(|event, _| match event {
        Event::Stopped { cause } => Some(cause),
        _ => None,
    });
    assert_eq!(cause.unwrap(), StopCause::VcpuFailed);
}
