//! The whole path from a shell to a forked child with a guest of ten bytes, on the host's own KVM.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

use forkd_sys::{Channel, ChannelError};
use forkd_types::{Engine, MiB};
use forkd_vmm::kvm::VcpuState;
use forkd_vmm::state::MachineState;
use forkd_vmm_driver::{Attach, Client, ClientError, tiny};
use forkd_vmm_proto::{
    BootSpec, COUNTERS, Command, ConsoleSpec, CpuModel, CutExtent, CutSpec, FdIndex, ImageId,
    MAX_MESSAGE, MemoryImage, NetAttachment, NetBackend, NetSpec, PROTOCOL_VERSION, PageIndex,
    Reply, Request, RestoreSpec, Shape, StopCause, VmmErrorCode, VmmPhase, VsockSpec, encode,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const SHAPE: Shape = Shape {
    engine: Engine::FORKD,
    memory: MiB(64),
    vcpus: 1,
    cpu: CpuModel::Host,
};

/// Descriptors of every VM beside its kernel or snapshot.
struct Surroundings {
    _dir: tempfile::TempDir,
    listener: OwnedFd,
    console: File,
}

impl Surroundings {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("vsock")).unwrap();
        listener.set_nonblocking(true).unwrap();
        Self {
            _dir: dir,
            listener: listener.into(),
            console: tempfile::tempfile().unwrap(),
        }
    }

    fn vsock<'a>(&'a self, attach: &mut Attach<'a>) -> VsockSpec {
        VsockSpec {
            cid: 3,
            listener: attach.add(&self.listener),
        }
    }

    fn console<'a>(&'a self, attach: &mut Attach<'a>) -> ConsoleSpec {
        ConsoleSpec {
            output: attach.add(&self.console),
            bytes_per_second: 0,
            max_bytes: 0,
        }
    }
}

fn has_kvm() -> bool {
    let there = Path::new("/dev/kvm").exists();
    if !there {
        forkd_sys::testing::leave_out("kvm");
    }
    there
}

fn start() -> Client {
    let mut client = Client::start(Path::new(env!("CARGO_BIN_EXE_forkd-vmm")), &[]).unwrap();
    client.prepare(SHAPE).unwrap();
    client
}

fn boot(client: &mut Client, around: &Surroundings, run: bool) {
    let mut kernel = tempfile::tempfile().unwrap();
    kernel.write_all(&tiny::image()).unwrap();
    let mut attach = Attach::new();
    let spec = BootSpec {
        kernel: attach.add(&kernel),
        initramfs: None,
        cmdline: String::new(),
        disks: vec![],
        net: NetSpec::default(),
        mac: [2, 0, 0, 0, 0, 1],
        vsock: around.vsock(&mut attach),
        console: around.console(&mut attach),
        generation: [1; 16],
        run,
    };
    client.boot(spec, &attach).unwrap();
}

struct Snapshot {
    state: File,
    memory: File,
}

fn cut(client: &mut Client, resume: bool) -> Snapshot {
    let snapshot = Snapshot {
        state: tempfile::tempfile().unwrap(),
        memory: tempfile::tempfile().unwrap(),
    };
    let mut attach = Attach::new();
    let spec = CutSpec {
        state: attach.add(&snapshot.state),
        memory: attach.add(&snapshot.memory),
        extent: CutExtent::All,
        new_layers: vec![],
        resume,
    };
    let report = client.cut(spec, &attach).unwrap();
    assert!(report.pages_written > 0);
    assert_eq!(report.state_bytes, snapshot.state.metadata().unwrap().len());
    snapshot
}

fn restore(
    client: &mut Client,
    around: &Surroundings,
    snapshot: &Snapshot,
) -> Result<(), ClientError> {
    let mut attach = Attach::new();
    let spec = RestoreSpec {
        state: attach.add(&snapshot.state),
        memory: MemoryImage {
            layers: vec![attach.add(&snapshot.memory)],
            index: PageIndex::Identity,
        },
        disks: vec![],
        net: NetSpec::default(),
        vsock: around.vsock(&mut attach),
        console: around.console(&mut attach),
        generation: [2; 16],
        prefault: None,
        run: true,
    };
    client.restore(spec, &attach)
}

fn phase(client: &mut Client) -> VmmPhase {
    match client.ask(Command::Status, &Attach::new()).unwrap() {
        Reply::Status(status) => status.phase,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_child_of_a_paused_parent_runs_its_first_instruction() {
    if !has_kvm() {
        return;
    }
    let around = Surroundings::new();
    let mut parent = start();
    boot(&mut parent, &around, false);
    assert_eq!(phase(&mut parent), VmmPhase::Paused);
    let snapshot = cut(&mut parent, false);

    for _ in 0..3 {
        let around = Surroundings::new();
        let mut child = start();
        restore(&mut child, &around, &snapshot).unwrap();
        child.wait_ready().unwrap();
        assert!(child.stop().unwrap().success());
    }
    parent
        .ask(Command::Resume, &Attach::new())
        .expect("the parent goes on");
    parent.wait_ready().unwrap();
    assert!(parent.stop().unwrap().success());
}

#[test]
fn a_running_guest_is_paused_resumed_and_cut() {
    if !has_kvm() {
        return;
    }
    let around = Surroundings::new();
    let mut vm = start();
    boot(&mut vm, &around, true);
    vm.wait_ready().unwrap();
    for _ in 0..20 {
        vm.ask(Command::Pause, &Attach::new()).unwrap();
        assert_eq!(phase(&mut vm), VmmPhase::Paused);
        vm.ask(Command::Resume, &Attach::new()).unwrap();
    }
    let snapshot = cut(&mut vm, true);
    assert_eq!(phase(&mut vm), VmmPhase::Running);
    let around = Surroundings::new();
    let mut child = start();
    restore(&mut child, &around, &snapshot).unwrap();
    assert_eq!(phase(&mut child), VmmPhase::Running);
    assert!(child.stop().unwrap().success());
}

fn refused(result: Result<impl std::fmt::Debug, ClientError>) -> VmmErrorCode {
    match result {
        Err(ClientError::Refused(error)) => error.code,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn damaged_snapshots_are_refused_and_the_shell_stays_fresh() {
    if !has_kvm() {
        return;
    }
    use std::os::unix::fs::FileExt;
    let around = Surroundings::new();
    let mut parent = start();
    boot(&mut parent, &around, false);
    let snapshot = cut(&mut parent, false);

    let mut child = start();
    let mut byte = [0];
    snapshot.state.read_exact_at(&mut byte, 1000).unwrap();
    snapshot.state.write_all_at(&[byte[0] ^ 1], 1000).unwrap();
    let around = Surroundings::new();
    assert_eq!(
        refused(restore(&mut child, &around, &snapshot)),
        VmmErrorCode::BadSnapshot
    );
    snapshot.state.write_all_at(&byte, 1000).unwrap();

    let short = Snapshot {
        state: snapshot.state.try_clone().unwrap(),
        memory: tempfile::tempfile().unwrap(),
    };
    short.memory.set_len(1 << 20).unwrap();
    assert_eq!(
        refused(restore(&mut child, &around, &short)),
        VmmErrorCode::BadSnapshot
    );

    restore(&mut child, &around, &snapshot).expect("the shell is still fresh");
    child.wait_ready().unwrap();
}

/// The snapshot with a state that `change` was applied to, with a correct checksum.
fn forged(snapshot: &Snapshot, change: impl FnOnce(&mut VcpuState)) -> Snapshot {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; snapshot.state.metadata().unwrap().len() as usize];
    snapshot.state.read_exact_at(&mut bytes, 0).unwrap();
    let mut state = MachineState::decode(&bytes).unwrap();
    change(&mut state.vcpus[0]);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&state.encode().unwrap()).unwrap();
    Snapshot {
        state: file,
        memory: snapshot.memory.try_clone().unwrap(),
    }
}

#[test]
fn a_forged_cpu_is_refused_and_the_shell_stays_fresh() {
    if !has_kvm() {
        return;
    }
    let around = Surroundings::new();
    let mut parent = start();
    boot(&mut parent, &around, false);
    let snapshot = cut(&mut parent, false);
    let leaf = |state: &mut VcpuState, function| {
        state
            .cpuid
            .iter()
            .position(|entry| entry.function == function)
            .unwrap()
    };
    let msr = |index, data| kvm_bindings::kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    let nested_virtualisation = forged(&snapshot, |state| {
        let at = leaf(state, 1);
        state.cpuid[at].ecx |= 1 << 5;
        let at = leaf(state, 0x8000_0001);
        state.cpuid[at].ecx |= 1 << 2;
    });
    let counters = forged(&snapshot, |state| {
        let mut entry = state.cpuid[0];
        (entry.function, entry.eax) = (0xa, 0x0730_0402);
        state.cpuid.push(entry);
    });
    let vmx_register = forged(&snapshot, |state| state.msrs.push(msr(0x480, 1)));
    let async_faults = forged(&snapshot, |state| state.msrs.push(msr(0x4b56_4d02, 1)));
    let unknown_register = forged(&snapshot, |state| state.msrs.push(msr(0x1234_5678, 1)));
    let nested_svm = forged(&snapshot, |state| state.sregs.efer |= 1 << 12);

    let mut child = start();
    let around = Surroundings::new();
    for (n, forged) in [
        nested_virtualisation,
        counters,
        vmx_register,
        async_faults,
        unknown_register,
        nested_svm,
    ]
    .iter()
    .enumerate()
    {
        let code = refused(restore(&mut child, &around, forged));
        assert_eq!(code, VmmErrorCode::Incompatible, "case {n}");
    }
    let same = forged(&snapshot, |_| {});
    restore(&mut child, &around, &same).expect("the shell is still fresh");
    child.wait_ready().unwrap();
}

#[test]
fn a_snapshot_does_not_fit_another_shape() {
    if !has_kvm() {
        return;
    }
    let around = Surroundings::new();
    let mut parent = start();
    boot(&mut parent, &around, false);
    let snapshot = cut(&mut parent, false);
    let mut child = Client::start(Path::new(env!("CARGO_BIN_EXE_forkd-vmm")), &[]).unwrap();
    child
        .prepare(Shape {
            memory: MiB(128),
            ..SHAPE
        })
        .unwrap();
    assert_eq!(
        refused(restore(&mut child, &around, &snapshot)),
        VmmErrorCode::Incompatible
    );
}

#[test]
fn counters_are_those_of_the_list() {
    if !has_kvm() {
        return;
    }
    let around = Surroundings::new();
    let mut vm = start();
    assert!(!vm.counters().unwrap().0.is_empty(), "a shell has counters");
    boot(&mut vm, &around, true);
    vm.wait_ready().unwrap();
    let counters = vm.counters().unwrap();
    let known = counters.known();
    let strangers: Vec<_> = counters
        .0
        .iter()
        .filter(|(name, _)| {
            !known.iter().any(|c| {
                let number = c.number.map_or(String::new(), |n| n.to_string());
                *name == format!("{}{number}.{}", c.device, c.info.name)
            })
        })
        .collect();
    assert!(strangers.is_empty(), "not in the list: {strangers:?}");
    assert_eq!(known.len(), counters.0.len(), "a name is there twice");
    for device in ["rng", "balloon", "vsock", "console", "machine"] {
        let listed = COUNTERS.iter().filter(|c| c.devices.contains(&device));
        for info in listed {
            assert!(
                known.iter().any(|c| (c.device, c.info) == (device, info)),
                "{device}.{} is listed and not reported",
                info.name
            );
        }
    }
}

#[test]
fn orders_out_of_order_are_refused() {
    if !has_kvm() {
        return;
    }
    let mut client = Client::start(Path::new(env!("CARGO_BIN_EXE_forkd-vmm")), &[]).unwrap();
    for command in [Command::Pause, Command::Resume, Command::PowerButton] {
        assert_eq!(
            refused(client.ask(command, &Attach::new())),
            VmmErrorCode::WrongPhase
        );
    }
    let shapes = [
        Shape { vcpus: 0, ..SHAPE },
        Shape { vcpus: 33, ..SHAPE },
        Shape {
            memory: MiB(63),
            ..SHAPE
        },
        Shape {
            memory: MiB(u32::MAX),
            ..SHAPE
        },
    ];
    for shape in shapes {
        assert_eq!(refused(client.prepare(shape)), VmmErrorCode::BadRequest);
    }
    client.prepare(SHAPE).unwrap();
    assert_eq!(refused(client.prepare(SHAPE)), VmmErrorCode::WrongPhase);
    assert_eq!(phase(&mut client), VmmPhase::Shell);
    let seq_stop = client.wait_exit_after_stop();
    assert!(seq_stop.success());
}

trait StopAndWait {
    fn wait_exit_after_stop(self) -> std::process::ExitStatus;
}

impl StopAndWait for Client {
    fn wait_exit_after_stop(mut self) -> std::process::ExitStatus {
        self.send(Command::Stop, &Attach::new()).unwrap();
        let cause = self
            .wait_event(|event, _| match event {
                forkd_vmm_proto::Event::Stopped { cause } => Some(cause),
                _ => None,
            })
            .unwrap();
        assert_eq!(cause, StopCause::Asked);
        self.wait_exit().unwrap()
    }
}

#[test]
fn a_chain_of_changes_restores_at_every_depth() {
    if !has_kvm() {
        return;
    }
    let around = Surroundings::new();
    let mut parent = start();
    boot(&mut parent, &around, false);
    let base = cut(&mut parent, false);
    let mut state = base.state;
    let mut layers = vec![base.memory];
    let mut index: Option<File> = None;
    for depth in 1..=3u8 {
        let around = Surroundings::new();
        let mut child = start();
        let mut attach = Attach::new();
        let spec = RestoreSpec {
            state: attach.add(&state),
            memory: MemoryImage {
                layers: layers.iter().map(|layer| attach.add(layer)).collect(),
                index: match &index {
                    Some(index) => PageIndex::File(attach.add(index)),
                    None => PageIndex::Identity,
                },
            },
            disks: vec![],
            net: NetSpec::default(),
            vsock: around.vsock(&mut attach),
            console: around.console(&mut attach),
            generation: [depth; 16],
            prefault: None,
            run: false,
        };
        child.restore(spec, &attach).unwrap();
        let (next_state, memory, map) = (
            tempfile::tempfile().unwrap(),
            tempfile::tempfile().unwrap(),
            tempfile::tempfile().unwrap(),
        );
        let mut attach = Attach::new();
        let spec = CutSpec {
            state: attach.add(&next_state),
            memory: attach.add(&memory),
            extent: CutExtent::Since {
                image: ImageId::START,
                index: attach.add(&map),
            },
            new_layers: vec![],
            resume: false,
        };
        let report = child.cut(spec, &attach).unwrap();
        assert!(
            (1..16).contains(&report.pages_written),
            "only the generation id changed, {} pages were written",
            report.pages_written
        );
        child.ask(Command::Resume, &Attach::new()).unwrap();
        child.wait_ready().expect("the child runs at this depth");
        state = next_state;
        layers.push(memory);
        index = Some(map);
    }
}

#[test]
fn the_network_back_end_is_exchanged_while_the_guest_runs() {
    if !has_kvm() {
        return;
    }
    let around = Surroundings::new();
    let mut vm = start();
    let detach = Command::SetNet { backend: None };
    assert_eq!(
        refused(vm.ask(detach.clone(), &Attach::new()).map(drop)),
        VmmErrorCode::WrongPhase
    );
    boot(&mut vm, &around, true);
    vm.wait_ready().unwrap();
    let (ours, theirs) = std::os::unix::net::UnixDatagram::pair().unwrap();
    let mut attach = Attach::new();
    let backend = Some(NetAttachment {
        fd: attach.add(&theirs),
        kind: NetBackend::Socket,
    });
    vm.ask(Command::SetNet { backend }, &attach).unwrap();
    drop(theirs);
    ours.send(&[0; 72]).expect("the VMM holds the other end");
    vm.ask(detach, &Attach::new()).unwrap();
    assert!(ours.send(&[0; 72]).is_err(), "the VMM has closed its end");
    assert_eq!(phase(&mut vm), VmmPhase::Running);
    // A descriptor that did not come along.
    let backend = Some(NetAttachment {
        fd: FdIndex(3),
        kind: NetBackend::Socket,
    });
    let lacking = vm.ask(Command::SetNet { backend }, &Attach::new());
    assert_eq!(refused(lacking.map(drop)), VmmErrorCode::BadRequest);
    assert_eq!(phase(&mut vm), VmmPhase::Running);
}

#[test]
fn a_cut_that_fails_leaves_the_guest_running() {
    if !has_kvm() {
        return;
    }
    let around = Surroundings::new();
    let mut vm = start();
    boot(&mut vm, &around, true);
    vm.wait_ready().unwrap();
    let state = tempfile::tempfile().unwrap();
    let null = File::open("/dev/null").unwrap();
    for (state, memory) in [(&state, &null), (&null, &state), (&null, &null)] {
        let mut attach = Attach::new();
        let spec = CutSpec {
            state: attach.add(state),
            memory: attach.add(memory),
            extent: CutExtent::All,
            new_layers: vec![],
            resume: false,
        };
        assert!(vm.cut(spec, &attach).is_err());
        assert_eq!(phase(&mut vm), VmmPhase::Running);
    }
    cut(&mut vm, true);
}

/// Proportional set size of a process without its guest's memory, in KiB.
fn added_memory(pid: u32, guest_kib: u64) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut skip, mut pss) = (false, 0);
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("Size:") => skip = words.next().and_then(|w| w.parse().ok()) == Some(guest_kib),
            Some("Pss:") if !skip => {
                pss += words
                    .next()
                    .and_then(|w| w.parse::<u64>().ok())
                    .unwrap_or(0);
            }
            _ => {}
        }
    }
    pss
}

#[test]
fn the_vmm_adds_less_than_five_mebibytes() {
    if !has_kvm() {
        return;
    }
    let around = Surroundings::new();
    let mut vm = Client::start(Path::new(env!("CARGO_BIN_EXE_forkd-vmm")), &[]).unwrap();
    vm.prepare(Shape {
        memory: MiB(128),
        ..SHAPE
    })
    .unwrap();
    boot(&mut vm, &around, true);
    vm.wait_ready().unwrap();
    let added = added_memory(vm.pid(), 128 * 1024);
    println!("the VMM adds {added} KiB");
    assert!(added < 5 * 1024, "the VMM adds {added} KiB");
}

#[test]
fn disks_have_a_thread_of_their_own() {
    if !has_kvm() {
        return;
    }
    let vm = start();
    let mut names: Vec<String> = std::fs::read_dir(format!("/proc/{}/task", vm.pid()))
        .unwrap()
        .map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap())
        .collect();
    names.sort();
    assert_eq!(names.concat(), "devices\ndisks\nforkd-vmm\nvcpu0\n");
}

#[test]
fn a_vmm_whose_controller_goes_away_ends() {
    if !has_kvm() {
        return;
    }
    let (ours, theirs) = forkd_sys::Channel::pair().unwrap();
    rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty()).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&theirs.as_fd()).to_string();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_forkd-vmm"))
        .args(["--control-fd", &number])
        .spawn()
        .unwrap();
    drop((ours, theirs));
    assert_eq!(child.wait().unwrap().code(), Some(20));
}

/// Although the test holds the other end of the control socket, as a daemon does.
#[test]
fn a_vmm_ends_with_the_process_that_started_it() {
    let (ours, theirs) = Channel::pair().unwrap();
    let program = env!("CARGO_BIN_EXE_forkd-vmm");
    let mut parent = std::process::Command::new("/bin/sh")
        .args(["-c", "exec 3<&0; \"$0\" --control-fd 3 & wait", program])
        .stdin(OwnedFd::from(theirs))
        .spawn()
        .unwrap();
    let hello = Request {
        seq: 1,
        command: Command::Hello {
            version: PROTOCOL_VERSION,
        },
    };
    ours.send(&encode(&hello).unwrap(), &[]).unwrap();
    let mut buffer = vec![0; MAX_MESSAGE];
    ours.recv(&mut buffer).unwrap();
    parent.kill().unwrap();
    parent.wait().unwrap();
    let limit = Timespec {
        tv_sec: 60,
        tv_nsec: 0,
    };
    let ended = poll(&mut [PollFd::new(&ours, PollFlags::IN)], Some(&limit));
    assert_eq!(ended, Ok(1), "the VMM lives on");
    assert!(matches!(ours.recv(&mut buffer), Err(ChannelError::Closed)));
}
