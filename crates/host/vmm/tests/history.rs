//! Cuts that build on each other, checkpoints and roll-backs of a guest that never stops writing.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use forkd_types::{Engine, MiB};
use forkd_vmm::state::MachineState;
use forkd_vmm_driver::{Attach, Client, ClientError, tiny};
use forkd_vmm_proto::{
    BootSpec, CheckpointReport, CheckpointSpec, Command, ConsoleSpec, CpuModel, CutExtent,
    CutReport, CutSpec, ImageId, MemoryImage, NetSpec, PageIndex, PageMap, Reply, RestoreSpec,
    RollbackSpec, Shape, VmmErrorCode, VsockSpec,
};

const PAGES: u32 = 512;
const SHAPE: Shape = Shape {
    engine: Engine::FORKD,
    memory: MiB(64),
    vcpus: 1,
    cpu: CpuModel::Host,
};

/// A machine and what it was given.
struct Vm {
    client: Client,
    _around: (tempfile::TempDir, OwnedFd, File),
}

/// A cut, with all layers of memory it is made of.
struct Taken {
    state: File,
    layers: Vec<File>,
    map: PageMap,
    report: CutReport,
}

fn has_kvm() -> bool {
    let there = Path::new("/dev/kvm").exists();
    if !there {
        forkd_sys::testing::leave_out("kvm");
    }
    there
}

fn file() -> File {
    tempfile::tempfile().unwrap()
}

fn surroundings() -> (tempfile::TempDir, OwnedFd, File) {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("vsock")).unwrap();
    (dir, listener.into(), file())
}

impl Vm {
    fn shell() -> Self {
        let mut client = Client::start(Path::new(env!("CARGO_BIN_EXE_forkd-vmm")), &[]).unwrap();
        client.prepare(SHAPE).unwrap();
        Self {
            client,
            _around: surroundings(),
        }
    }

    /// A guest that has not run its first instruction, frozen.
    fn base() -> Taken {
        let mut vm = Self::shell();
        let mut kernel = file();
        kernel.write_all(&tiny::dirtying(PAGES)).unwrap();
        let (_, listener, console) = &vm._around;
        let mut attach = Attach::new();
        let spec = BootSpec {
            kernel: attach.add(&kernel),
            initramfs: None,
            cmdline: String::new(),
            disks: vec![],
            net: NetSpec::default(),
            mac: [2, 0, 0, 0, 0, 1],
            vsock: VsockSpec {
                cid: 3,
                listener: attach.add(listener),
            },
            console: ConsoleSpec {
                output: attach.add(console),
                bytes_per_second: 0,
                max_bytes: 0,
            },
            generation: [1; 16],
            run: false,
        };
        vm.client.boot(spec, &attach).unwrap();
        vm.cut(&[], None)
    }

    fn from(taken: &Taken) -> Self {
        let mut vm = Self::shell();
        let (_, listener, console) = &vm._around;
        let mut index = file();
        index.write_all(&taken.map.encode()).unwrap();
        let mut attach = Attach::new();
        let spec = RestoreSpec {
            state: attach.add(&taken.state),
            memory: MemoryImage {
                layers: taken.layers.iter().map(|layer| attach.add(layer)).collect(),
                index: PageIndex::File(attach.add(&index)),
            },
            disks: vec![],
            net: NetSpec::default(),
            vsock: VsockSpec {
                cid: 3,
                listener: attach.add(listener),
            },
            console: ConsoleSpec {
                output: attach.add(console),
                bytes_per_second: 0,
                max_bytes: 0,
            },
            generation: [2; 16],
            prefault: None,
            run: true,
        };
        vm.client.restore(spec, &attach).unwrap();
        vm
    }

    /// Cuts onto what `below` is made of; onto the last cut if its number is given.
    fn cut(&mut self, below: &[File], onto: Option<ImageId>) -> Taken {
        let (state, memory, index) = (file(), file(), file());
        let mut attach = Attach::new();
        let changed = !below.is_empty();
        let spec = CutSpec {
            state: attach.add(&state),
            memory: attach.add(&memory),
            extent: match changed {
                true => CutExtent::Since {
                    image: onto.unwrap_or(ImageId::START),
                    index: attach.add(&index),
                },
                false => CutExtent::All,
            },
            new_layers: vec![],
            resume: true,
        };
        let report = self.client.cut(spec, &attach).unwrap();
        let mut layers: Vec<File> = below.iter().map(|f| f.try_clone().unwrap()).collect();
        layers.push(memory);
        let map = if changed {
            let mut bytes = vec![0; index.metadata().unwrap().len() as usize];
            index.read_exact_at(&mut bytes, 0).unwrap();
            PageMap::decode(&bytes).unwrap()
        } else {
            PageMap::identity((64 << 20) / 4096)
        };
        Taken {
            state,
            layers,
            map,
            report,
        }
    }

    fn checkpoint(&mut self) -> CheckpointReport {
        let memory = file();
        let mut attach = Attach::new();
        let spec = CheckpointSpec {
            memory: attach.add(&memory),
            new_layers: vec![],
        };
        match self.client.ask(Command::Checkpoint(spec), &attach).unwrap() {
            Reply::Checkpoint(report) => report,
            other => panic!("{other:?}"),
        }
    }

    fn rollback(&mut self, to: u64) -> Result<Reply, ClientError> {
        let spec = RollbackSpec {
            to,
            new_layers: vec![],
            generation: [7; 16],
        };
        self.client.ask(Command::Rollback(spec), &Attach::new())
    }

    fn pause(&mut self) {
        self.client.ask(Command::Pause, &Attach::new()).unwrap();
    }

    fn resume(&mut self) {
        self.client.ask(Command::Resume, &Attach::new()).unwrap();
    }

    /// Lets the guest go over its pages at least twice from now on.
    fn let_run(&mut self) {
        let end = self.client.ready_signals().unwrap() + 3;
        while self.client.ready_signals().unwrap() < end {
            std::thread::yield_now();
        }
    }
}

impl Taken {
    fn word(&self, page: u32) -> u64 {
        let Some(extent) = self
            .map
            .extents()
            .iter()
            .find(|e| (e.first..e.first + e.count).contains(&page))
        else {
            return 0;
        };
        let at = extent.layer_first + page - extent.first;
        let mut bytes = [0; 8];
        self.layers[extent.layer as usize]
            .read_exact_at(&mut bytes, u64::from(at) * 4096)
            .unwrap();
        u64::from_le_bytes(bytes)
    }

    fn words(&self) -> Vec<u64> {
        let first = tiny::DIRTY_START / 4096;
        (first..first + PAGES).map(|page| self.word(page)).collect()
    }

    /// Where the guest's pointer stands, in pages.
    fn place(&self) -> usize {
        let mut bytes = vec![0; self.state.metadata().unwrap().len() as usize];
        self.state.read_exact_at(&mut bytes, 0).unwrap();
        let rdi = MachineState::decode(&bytes).unwrap().vcpus[0].regs.rdi;
        (rdi as usize).saturating_sub(tiny::DIRTY_START as usize) / 4096
    }

    /// The words up to where the guest is are one more than the others, or the cut is torn.
    fn assert_whole(&self) {
        let (words, place) = (self.words(), self.place());
        let fits = |at: usize| {
            let (before, after) = words.split_at(at.min(words.len()));
            before.windows(2).all(|w| w[0] == w[1])
                && after.windows(2).all(|w| w[0] == w[1])
                && match (before.first(), after.first()) {
                    (Some(before), Some(after)) => *before == after + 1,
                    _ => true,
                }
        };
        assert!(
            fits(place) || fits(place + 1),
            "torn at {place}: {:?}",
            &words[place.saturating_sub(3)..words.len().min(place + 3)]
        );
    }
}

#[test]
fn cuts_of_a_writing_guest_build_on_each_other_and_are_whole() {
    if !has_kvm() {
        return;
    }
    let base = Vm::base();
    let mut vm = Vm::from(&base);
    vm.let_run();
    let mut last = vm.cut(&base.layers, None);
    last.assert_whole();
    for _ in 0..12 {
        vm.let_run();
        let next = vm.cut(&last.layers, Some(last.report.image));
        next.assert_whole();
        assert!(next.report.pages_written <= u64::from(PAGES) + 16);
        last = next;
    }
    let mut child = Vm::from(&last);
    child.let_run();
    let again = child.cut(&last.layers, None);
    again.assert_whole();
    assert!(again.words()[0] > last.words()[0]);

    // Nothing is written while it stands still, so there is nothing to hold.
    vm.pause();
    let still = vm.cut(&last.layers, Some(last.report.image));
    let after = vm.cut(&still.layers, Some(still.report.image));
    assert_eq!(after.report.pages_written + after.report.zero_pages, 0);
    assert_eq!(after.words(), still.words());
    // Onto the base again, as after a cut that was not kept.
    let whole = vm.cut(&base.layers, None);
    assert_eq!(whole.words(), still.words());
}

#[test]
fn a_cut_onto_one_that_is_not_the_last_is_refused() {
    if !has_kvm() {
        return;
    }
    let base = Vm::base();
    let mut vm = Vm::from(&base);
    let (state, memory, index) = (file(), file(), file());
    let mut attach = Attach::new();
    let spec = CutSpec {
        state: attach.add(&state),
        memory: attach.add(&memory),
        extent: CutExtent::Since {
            image: ImageId(9),
            index: attach.add(&index),
        },
        new_layers: vec![],
        resume: true,
    };
    match vm.client.cut(spec, &attach) {
        Err(ClientError::Refused(error)) => assert_eq!(error.code, VmmErrorCode::BadRequest),
        other => panic!("{other:?}"),
    }
    vm.let_run();
}

#[test]
fn roll_backs_lead_to_any_checkpoint_and_the_guest_goes_on_from_there() {
    if !has_kvm() {
        return;
    }
    let base = Vm::base();
    let mut vm = Vm::from(&base);
    let mut kept = Vec::new();
    for _ in 0..4 {
        vm.let_run();
        vm.pause();
        let report = vm.checkpoint();
        assert!(!report.unchanged);
        let seen = vm.cut(&base.layers, None);
        assert_eq!(vm.checkpoint().id, report.id, "nothing has changed");
        kept.push((report.id, seen));
        vm.resume();
    }
    for at in [0, 3, 1, 1, 2, 0] {
        let (id, seen) = &kept[at];
        vm.let_run();
        vm.pause();
        vm.rollback(*id).unwrap();
        let now = vm.cut(&base.layers, None);
        assert_eq!((now.words(), now.place()), (seen.words(), seen.place()));
        vm.resume();
        vm.let_run();
        // A branch off the old line.
        let off = vm.checkpoint();
        vm.let_run();
        vm.rollback(off.id).unwrap();
        vm.let_run();
        vm.cut(&base.layers, None).assert_whole();
    }
    let gone = kept[3].0;
    vm.client
        .ask(Command::DropCheckpoint { id: gone }, &Attach::new())
        .unwrap();
    match vm.rollback(gone) {
        Err(ClientError::Refused(error)) => assert_eq!(error.code, VmmErrorCode::NoCheckpoint),
        other => panic!("{other:?}"),
    }
    vm.let_run();
}

#[test]
fn cuts_and_checkpoints_wait_for_their_turn() {
    if !has_kvm() {
        return;
    }
    let base = Vm::base();
    let mut vm = Vm::from(&base);
    vm.let_run();
    let files: Vec<File> = (0..8).map(|_| file()).collect();
    let asked: Vec<u64> = files
        .iter()
        .map(|memory| {
            let mut attach = Attach::new();
            let spec = CheckpointSpec {
                memory: attach.add(memory),
                new_layers: vec![],
            };
            vm.client.send(Command::Checkpoint(spec), &attach).unwrap()
        })
        .collect();
    let ids: Vec<u64> = asked
        .into_iter()
        .map(|seq| match vm.client.answer_to(seq).unwrap() {
            Reply::Checkpoint(report) => report.id,
            other => panic!("{other:?}"),
        })
        .collect();
    assert!(ids.is_sorted());
    vm.let_run();
}
