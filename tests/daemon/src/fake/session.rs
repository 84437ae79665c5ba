//! The VMM protocol of a fake VMM: one command after another, each answered once.
//!
//! [`serve`] reads the control socket until the VM ends. Faults strike at named steps.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use forkd_sys::{Channel, ChannelError};
use forkd_types::Engine;
use forkd_vmm_proto::{
    BootSpec, Capabilities, CheckpointReport, CheckpointSpec, Command, Counters, CutExtent,
    CutReport, CutSpec, DiskSpec, Event, ExitCode, FdIndex, FromVmm, ImageId, MAX_MESSAGE,
    MemoryImage, NetAttachment, PROTOCOL_VERSION, PageIndex, PageMap, Reply, Request, ResponseTo,
    RestoreSpec, RollbackReport, RollbackSpec, Shape, Status, StopCause, VmmError, VmmErrorCode,
    VmmPhase, VsockSpec, decode,
};

use super::agent;
use super::faults::{Fault, Faults, Step};
use super::guest::Guest;
use super::memory::{Image, Pages};
use super::vm::{GARBAGE, Vm};

/// A state file begins with this; what follows makes it unique.
const STATE_MAGIC: &[u8; 8] = b"FAKEVMST";
/// A fake pause; not 0, which stands for a VM that stays paused.
const PAUSE_US: u64 = 100;

type Answer = Result<Reply, VmmError>;

/// Serves the control socket until the VM ends or the socket closes.
pub fn serve(control: OwnedFd, faults: Faults) -> anyhow::Result<ExitCode> {
    let vm = Arc::new(Vm::new(Channel::from_fd(control), faults));
    let mut session = Session {
        vm: Arc::clone(&vm),
        greeted: false,
        shape: None,
        filled: false,
        agent_ready: false,
        writable_disks: 0,
        empty_slots: 0,
        restored: None,
        last_cut: None,
        next_number: 1,
        checkpoints: BTreeMap::new(),
    };
    let mut buffer = vec![0; MAX_MESSAGE];
    loop {
        let received = match vm.control().recv(&mut buffer) {
            Ok(received) => received,
            Err(ChannelError::Closed) => return Ok(ExitCode::ControlLost),
            Err(error) => return Err(error.into()),
        };
        let Ok(Request { seq, command }) = decode(&buffer[..received.len]) else {
            continue;
        };
        session.obey(seq, command, &Fds(received.fds));
    }
}

/// A shell, and the VM once the shell is filled.
struct Session {
    vm: Arc<Vm>,
    greeted: bool,
    shape: Option<Shape>,
    filled: bool,
    agent_ready: bool,
    writable_disks: usize,
    empty_slots: usize,
    /// The image the VM was restored from: [`ImageId::START`].
    restored: Option<Image>,
    /// The last cut that succeeded, with its number.
    last_cut: Option<(u64, Image)>,
    /// The next number of a cut or checkpoint.
    next_number: u64,
    /// The guest, and how many layers each volume had below.
    checkpoints: BTreeMap<u64, (Guest, BTreeMap<u8, usize>)>,
}

impl Session {
    fn obey(&mut self, seq: u64, command: Command, fds: &Fds) {
        let stop = matches!(command, Command::Stop);
        let result = self.carry_out(seq, command, fds);
        let boots = matches!(result, Ok((_, Then::AgentReady)));
        self.answer(seq, result.map(|(reply, _)| reply));
        if boots {
            self.agent_ready = true;
            self.vm.send(&FromVmm::Event(Event::AgentReady));
        }
        if stop {
            self.vm.end(StopCause::Asked);
        }
    }

    fn carry_out(
        &mut self,
        seq: u64,
        command: Command,
        fds: &Fds,
    ) -> Result<(Reply, Then), VmmError> {
        if let Some(step) = first_step(&command) {
            self.strike(step)?;
        }
        let greeting = matches!(command, Command::Hello { .. });
        if !greeting && !self.greeted {
            return Err(wrong_phase("say hello first"));
        }
        let reply = match command {
            Command::Hello { version } => self.greet(version)?,
            Command::Prepare(spec) => {
                self.shape = Some(spec.shape);
                Reply::Done
            }
            Command::Boot(spec) => {
                self.boot(&spec, fds)?;
                return Ok((Reply::Done, Then::AgentReady));
            }
            Command::Restore(spec) => self.restore(&spec, fds)?,
            Command::Pause => self.with_vm(Vm::pause)?,
            Command::Resume => self.with_vm(Vm::resume)?,
            Command::Cut(spec) => self.cut(seq, &spec, fds)?,
            Command::Checkpoint(spec) => self.checkpoint(seq, &spec, fds)?,
            Command::Rollback(spec) => {
                let reply = self.rollback(&spec, fds)?;
                return Ok((reply, Then::AgentReady));
            }
            Command::DropCheckpoint { id } => {
                self.checkpoints
                    .remove(&id)
                    .ok_or_else(|| no_checkpoint(id))?;
                Reply::Done
            }
            Command::WorkingSet { output } => {
                fds.file(output)?
                    .write_all_at(b"working set", 0)
                    .map_err(failed)?;
                Reply::Done
            }
            Command::PowerButton => self.vm.end(StopCause::PowerOff),
            Command::Status => Reply::Status(self.status()),
            Command::Counters => Reply::Counters(counters()),
            Command::SetNet { backend } => self.plug(backend, fds)?,
            Command::AttachDisk { slot, disk } => self.attach(slot, &disk, fds)?,
            Command::MergedLayer { .. } | Command::Balloon { .. } | Command::Stop => Reply::Done,
        };
        Ok((reply, Then::Nothing))
    }

    fn answer(&self, seq: u64, result: Answer) {
        self.vm.send(&FromVmm::Response(ResponseTo { seq, result }));
    }

    fn strike(&self, step: Step) -> Result<(), VmmError> {
        match self.vm.arrive(step) {
            Fault::Garbage => {
                // The reader treats the connection as broken.
                let _ = self.vm.control().send(&GARBAGE, &[]);
                Err(failed(io::Error::other("garbage was sent")))
            }
            Fault::Fail => Err(failed(io::Error::other("a fault was injected"))),
            Fault::Pass | Fault::Hold | Fault::Die => Ok(()),
        }
    }

    fn greet(&mut self, version: u32) -> Answer {
        if version != PROTOCOL_VERSION {
            return Err(VmmError {
                code: VmmErrorCode::Version,
                message: format!("version {version} was offered, {PROTOCOL_VERSION} is spoken"),
            });
        }
        self.greeted = true;
        Ok(Reply::Hello {
            version: PROTOCOL_VERSION,
            program: "fake".to_owned(),
            engine: Engine::FORKD,
            capabilities: Capabilities::all(),
        })
    }

    fn status(&self) -> Status {
        let phase = match (self.shape, self.filled, self.vm.is_running()) {
            (None, ..) => VmmPhase::Empty,
            (Some(_), false, _) => VmmPhase::Shell,
            (Some(_), true, false) => VmmPhase::Paused,
            (Some(_), true, true) => VmmPhase::Running,
        };
        Status {
            phase,
            shape: self.shape,
            agent_ready: self.agent_ready,
        }
    }

    fn with_vm(&self, work: impl FnOnce(&Vm)) -> Answer {
        if !self.filled {
            return Err(wrong_phase("the shell is empty"));
        }
        work(&self.vm);
        Ok(Reply::Done)
    }

    fn boot(&mut self, spec: &BootSpec, fds: &Fds) -> Result<(), VmmError> {
        fds.file(spec.kernel)?;
        let guest = Guest {
            hostname: "fake".to_owned(),
            ..Guest::default()
        };
        self.fill(guest, &spec.disks, &spec.vsock, spec.run, fds)
    }

    fn restore(&mut self, spec: &RestoreSpec, fds: &Fds) -> Answer {
        let mut magic = [0; 8];
        fds.file(spec.state)?
            .read_exact_at(&mut magic, 0)
            .map_err(bad_snapshot)?;
        if magic != *STATE_MAGIC {
            return Err(bad_snapshot(io::Error::other("the state is not one")));
        }
        let image = self.open_image(&spec.memory, fds)?;
        let guest = image.guest().map_err(bad_snapshot)?;
        self.restored = Some(image);
        self.plug(spec.net.backend, fds)?;
        self.fill(guest, &spec.disks, &spec.vsock, spec.run, fds)?;
        Ok(Reply::Done)
    }

    /// Gives an empty slot its disk. The top layer holds what the guest writes below the mount.
    fn attach(&mut self, slot: u8, disk: &DiskSpec, fds: &Fds) -> Answer {
        if self.empty_slots == 0 || disk.read_only {
            return Err(VmmError {
                code: VmmErrorCode::BadRequest,
                message: format!("slot {slot} takes no disk"),
            });
        }
        let layers: Vec<File> = disk
            .layers
            .iter()
            .map(|layer| fds.file(*layer))
            .collect::<Result<_, _>>()?;
        fds.file(disk.base)?;
        self.empty_slots -= 1;
        self.writable_disks += 1;
        self.vm
            .volumes
            .attach(slot, &disk.serial, layers, false)
            .map_err(failed)?;
        Ok(Reply::Done)
    }

    /// Exchanges the back end of the network device.
    fn plug(&self, backend: Option<NetAttachment>, fds: &Fds) -> Answer {
        let socket = backend.map(|backend| fds.get(backend.fd)).transpose()?;
        self.vm.net.set(socket);
        Ok(Reply::Done)
    }

    fn open_image(&self, memory: &MemoryImage, fds: &Fds) -> Result<Image, VmmError> {
        let layers: Vec<File> = memory
            .layers
            .iter()
            .map(|layer| fds.file(*layer))
            .collect::<Result<_, _>>()?;
        let map = match memory.index {
            PageIndex::Identity => PageMap::identity(self.memory_pages()?),
            PageIndex::File(index) => {
                let mut bytes = Vec::new();
                // The descriptor is shared with other children, so its offset is undefined: read at fixed positions.
                At(&fds.file(index)?, 0)
                    .read_to_end(&mut bytes)
                    .map_err(bad_snapshot)?;
                PageMap::decode(&bytes).map_err(|error| bad_snapshot(io::Error::other(error)))?
            }
        };
        Image::read(map, &layers).map_err(bad_snapshot)
    }

    fn memory_pages(&self) -> Result<u32, VmmError> {
        let shape = self.shape.ok_or_else(|| wrong_phase("there is no shell"))?;
        Ok(shape.memory.0 << 8)
    }

    fn fill(
        &mut self,
        guest: Guest,
        disks: &[DiskSpec],
        vsock: &VsockSpec,
        run: bool,
        fds: &Fds,
    ) -> Result<(), VmmError> {
        if self.filled {
            return Err(wrong_phase("the shell is filled already"));
        }
        for disk in disks {
            fds.file(disk.base)?;
            for layer in &disk.layers {
                fds.file(*layer)?;
            }
        }
        let mut empty = 0;
        for disk in disks {
            let bare = disk.layers.is_empty() && !disk.read_only;
            let size = fds.file(disk.base)?.metadata().map_err(failed)?.len();
            empty += usize::from(bare && size == 0);
        }
        for (slot, disk) in (0u8..).zip(disks) {
            let layers = disk.layers.iter().map(|layer| fds.file(*layer));
            let layers = layers.collect::<Result<_, _>>()?;
            let attached = self.vm.volumes.attach(slot, &disk.serial, layers, true);
            attached.map_err(failed)?;
        }
        let writable = disks.iter().filter(|disk| !disk.read_only).count();
        self.writable_disks = writable - empty;
        self.empty_slots = empty;
        let listener = UnixListener::from(fds.get(vsock.listener)?);
        listener.set_nonblocking(false).map_err(failed)?;
        self.vm.replace(guest);
        self.filled = true;
        if run {
            self.vm.resume();
        }
        let vm = Arc::clone(&self.vm);
        std::thread::spawn(move || agent::listen(&vm, &listener));
        Ok(())
    }

    /// Captures the guest. The VM is paused when this returns.
    fn capture(&self, new_layers: &[FdIndex], resume: bool) -> Result<Guest, VmmError> {
        if !self.filled {
            return Err(wrong_phase("the shell is empty"));
        }
        let fits = new_layers.len() == self.writable_disks || (new_layers.is_empty() && !resume);
        if !fits {
            return Err(VmmError {
                code: VmmErrorCode::BadRequest,
                message: format!(
                    "{} new layers for {} writable disks",
                    new_layers.len(),
                    self.writable_disks
                ),
            });
        }
        self.vm.pause();
        Ok(self.vm.capture())
    }

    /// Puts new layers on the disks of volumes. To be called while the VM is paused.
    fn push_layers(&self, new_layers: &[FdIndex], fds: &Fds) -> Result<(), VmmError> {
        let layers = new_layers.iter().map(|layer| fds.file(*layer));
        let layers = layers.collect::<Result<_, _>>()?;
        self.vm.volumes.push_layers(layers);
        Ok(())
    }

    fn cut(&mut self, seq: u64, spec: &CutSpec, fds: &Fds) -> Answer {
        let base = self.base(spec)?;
        let guest = self.capture(&spec.new_layers, spec.resume)?;
        self.push_layers(&spec.new_layers, fds)?;
        if spec.resume {
            self.vm.resume();
        }
        let pause_us = if spec.resume { PAUSE_US } else { 0 };
        self.vm
            .send(&FromVmm::Event(Event::CutTaken { seq, pause_us }));
        let written = self.write_cut(spec, base.as_ref(), &guest, fds);
        if written.is_err() {
            // As forkd-vmm does: a source whose cut failed goes on.
            self.vm.resume();
        }
        let (image, pages_written) = written?;
        let number = self.number();
        self.last_cut = Some((number, image));
        Ok(Reply::Cut(CutReport {
            image: ImageId(number),
            pause_us,
            pages_written,
            total_us: PAUSE_US,
            ..CutReport::default()
        }))
    }

    /// The image a cut builds on; `None` for a cut of everything.
    fn base(&self, spec: &CutSpec) -> Result<Option<Image>, VmmError> {
        let CutExtent::Since { image: onto, .. } = spec.extent else {
            return Ok(None);
        };
        let found = match &self.last_cut {
            Some((number, image)) if ImageId(*number) == onto => Some(image),
            _ if onto == ImageId::START => self.restored.as_ref(),
            _ => None,
        };
        found.cloned().map(Some).ok_or_else(|| VmmError {
            code: VmmErrorCode::BadRequest,
            message: format!("there is no image {onto:?} to build on"),
        })
    }

    fn write_cut(
        &self,
        spec: &CutSpec,
        base: Option<&Image>,
        guest: &Guest,
        fds: &Fds,
    ) -> Result<(Image, u64), VmmError> {
        self.strike(Step::CutTaken)?;
        let mut state = STATE_MAGIC.to_vec();
        state.extend(rand::random::<[u8; 16]>());
        fds.file(spec.state)?
            .write_all_at(&state, 0)
            .map_err(failed)?;
        let memory = fds.file(spec.memory)?;
        let pages = Pages::of(guest).map_err(failed)?;
        let written = match (base, spec.extent) {
            (Some(base), CutExtent::Since { index, .. }) => {
                base.write_changed(pages, &memory, &fds.file(index)?)
            }
            _ => Image::write_all(pages, self.memory_pages()?, &memory),
        };
        let written = written.map_err(failed)?;
        self.strike(Step::CutWritten)?;
        Ok(written)
    }

    fn checkpoint(&mut self, seq: u64, spec: &CheckpointSpec, fds: &Fds) -> Answer {
        let guest = self.capture(&spec.new_layers, true)?;
        if let Some((id, (last, _))) = self.checkpoints.last_key_value()
            && *last == guest
        {
            self.vm.resume();
            return Ok(Reply::Checkpoint(CheckpointReport {
                id: *id,
                unchanged: true,
                layers_taken: vec![false; spec.new_layers.len()],
                ..CheckpointReport::default()
            }));
        }
        let below = self.vm.volumes.depths();
        self.push_layers(&spec.new_layers, fds)?;
        self.vm.resume();
        self.vm.send(&FromVmm::Event(Event::CutTaken {
            seq,
            pause_us: PAUSE_US,
        }));
        self.strike(Step::CheckpointTaken)?;
        let id = self.number();
        self.checkpoints.insert(id, (guest, below));
        Ok(Reply::Checkpoint(CheckpointReport {
            id,
            unchanged: false,
            layers_taken: vec![true; spec.new_layers.len()],
            pause_us: PAUSE_US,
            pages_written: 1,
            total_us: PAUSE_US,
        }))
    }

    fn rollback(&mut self, spec: &RollbackSpec, fds: &Fds) -> Answer {
        let (guest, below) = self
            .checkpoints
            .get(&spec.to)
            .ok_or_else(|| no_checkpoint(spec.to))?;
        self.agent_ready = false;
        self.vm.pause();
        self.vm.volumes.rewind(below).map_err(failed)?;
        self.push_layers(&spec.new_layers, fds)?;
        self.vm.replace(guest.clone());
        self.vm.reset_connections();
        self.vm.resume();
        self.checkpoints.split_off(&(spec.to + 1));
        self.strike(Step::RolledBack)?;
        Ok(Reply::Rollback(RollbackReport {
            pause_us: PAUSE_US,
            pages: 1,
            ..RollbackReport::default()
        }))
    }

    fn number(&mut self) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        number
    }
}

/// The action after an answer.
enum Then {
    Nothing,
    AgentReady,
}

fn first_step(command: &Command) -> Option<Step> {
    Some(match command {
        Command::Hello { .. } => Step::Hello,
        Command::Prepare(_) => Step::Prepare,
        Command::Boot(_) => Step::Boot,
        Command::Restore(_) => Step::Restore,
        Command::Pause => Step::Pause,
        Command::Resume => Step::Resume,
        Command::Cut(_) => Step::Cut,
        Command::Checkpoint(_) => Step::Checkpoint,
        Command::Rollback(_) => Step::Rollback,
        Command::MergedLayer { .. } => Step::MergedLayer,
        Command::AttachDisk { .. } => Step::AttachDisk,
        Command::Stop => Step::Stop,
        _ => return None,
    })
}

/// The descriptors of one message.
struct Fds(Vec<OwnedFd>);

impl Fds {
    fn get(&self, index: FdIndex) -> Result<OwnedFd, VmmError> {
        let missing = || VmmError {
            code: VmmErrorCode::BadRequest,
            message: format!("descriptor {} is missing", index.0),
        };
        let fd = self.0.get(usize::from(index.0)).ok_or_else(missing)?;
        fd.try_clone().map_err(failed)
    }

    fn file(&self, index: FdIndex) -> Result<File, VmmError> {
        self.get(index).map(File::from)
    }
}

/// Reads a file from a position, without touching its offset.
struct At<'a>(&'a File, u64);

impl Read for At<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.0.read_at(buffer, self.1)?;
        self.1 += count as u64;
        Ok(count)
    }
}

fn wrong_phase(message: &str) -> VmmError {
    VmmError {
        code: VmmErrorCode::WrongPhase,
        message: message.to_owned(),
    }
}

fn no_checkpoint(id: u64) -> VmmError {
    VmmError {
        code: VmmErrorCode::NoCheckpoint,
        message: format!("there is no checkpoint {id}"),
    }
}

fn failed(error: io::Error) -> VmmError {
    VmmError {
        code: VmmErrorCode::Io,
        message: error.to_string(),
    }
}

fn bad_snapshot(error: io::Error) -> VmmError {
    VmmError {
        code: VmmErrorCode::BadSnapshot,
        message: error.to_string(),
    }
}

/// The counters of every fake VMM.
fn counters() -> Counters {
    Counters(vec![("disk0.reads".to_owned(), 3)])
}
