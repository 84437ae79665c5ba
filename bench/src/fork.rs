//! The product's own fork path with a guest of a few bytes.
//!
//! The clock of a child starts when its shell is asked for and stops when its first instruction's signal has
//! come back: hand-out, console and socket of its own, descriptors, mapping, restore, the first run.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use forkd_sys::{Channel, ChannelError};
use forkd_types::MiB;
use forkd_vmm::client::Attach;
use forkd_vmm_proto::{
    BootSpec, Command, ConsoleSpec, CpuModel, CutReport, CutSpec, Event, FromVmm, MAX_MESSAGE,
    MemoryImage, PageIndex, Reply, Request, RestoreSpec, Shape, VsockSpec, decode, encode,
};
use rustix::event::epoll;

use crate::floor::Burst;
use crate::spawned::Spawned;

/// How long a VMM may take to answer before something is wrong.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// A frozen tiny guest and what it takes to fork it.
#[derive(Debug)]
pub struct Bench {
    spawned: Spawned,
    shape: Shape,
    state: File,
    memory: File,
    work: PathBuf,
    folders: u64,
}

/// The surroundings of one child: what the controller makes for each.
#[derive(Debug)]
struct Surroundings {
    console: File,
    listener: UnixListener,
}

impl Surroundings {
    fn make(work: &Path, number: u64) -> anyhow::Result<Self> {
        Ok(Self {
            console: File::create(work.join(format!("{number}.console")))?,
            listener: UnixListener::bind(work.join(format!("{number}.vsock")))?,
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

impl Bench {
    /// Boots the tiny guest up to its first instruction and freezes it there.
    pub fn new(work: &Path, memory: MiB) -> anyhow::Result<Self> {
        let mut spawned = Spawned::start(work)?;
        let shape = Shape {
            memory,
            vcpus: 1,
            cpu: CpuModel::Host,
        };
        let control = spawned.take(shape, 1)?.pop().context("no shell")?;
        let mut kernel = tempfile::tempfile_in(work)?;
        std::io::Write::write_all(&mut kernel, &forkd_vmm::tiny::image())?;
        let surroundings = Surroundings::make(work, 0)?;
        let mut attach = Attach::new();
        let spec = BootSpec {
            kernel: attach.add(&kernel),
            initramfs: None,
            cmdline: String::new(),
            disks: Vec::new(),
            net: None,
            vsock: surroundings.vsock(&mut attach),
            console: surroundings.console(&mut attach),
            generation: [1; 16],
            run: false,
        };
        ask(&control, Command::Boot(Box::new(spec)), &attach)?;
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
        ask(&control, Command::Cut(spec), &attach)?;
        send(&control, Command::Stop, &Attach::new())?;
        Ok(Self {
            spawned,
            shape,
            state,
            memory: image,
            work: work.to_owned(),
            folders: 0,
        })
    }

    /// Forks `n` children at once from pooled shells. Also says how long the pool took to fill.
    pub fn burst(&mut self, n: usize) -> anyhow::Result<(Burst, Duration)> {
        let filled = self.spawned.fill(self.shape, u32::try_from(n)?)?;
        // Shells have just been created; let the kernel finish with that before the clock starts.
        std::thread::sleep(Duration::from_millis(200));
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut children = Vec::with_capacity(n);
        let mut started = Vec::with_capacity(n);
        let mut each = vec![None; n];
        let begun = Instant::now();
        while children.len() < n {
            let asked = Instant::now();
            for control in self.spawned.take(self.shape, n - children.len())? {
                started.push(asked);
                self.restore(&control)?;
                let data = epoll::EventData::new_u64(children.len() as u64);
                epoll::add(&epoll, &control, data, epoll::EventFlags::IN)?;
                children.push(control);
            }
        }
        wait_for_all(&epoll, &children, &started, &mut each)?;
        let wall = begun.elapsed();
        self.spawned.stop_refilling(self.shape)?;
        for control in &children {
            send(control, Command::Stop, &Attach::new())?;
        }
        self.spawned.wait_until_none_lives()?;
        Ok((
            Burst {
                wall,
                each: each.into_iter().flatten().collect(),
            },
            filled,
        ))
    }

    fn restore(&mut self, control: &Channel) -> anyhow::Result<()> {
        self.folders += 1;
        let surroundings = Surroundings::make(&self.work, self.folders)?;
        let mut attach = Attach::new();
        let spec = RestoreSpec {
            state: attach.add(&self.state),
            memory: MemoryImage {
                layers: vec![attach.add(&self.memory)],
                index: PageIndex::Identity,
            },
            disks: Vec::new(),
            net: None,
            vsock: surroundings.vsock(&mut attach),
            console: surroundings.console(&mut attach),
            generation: u128::from(self.folders).to_le_bytes(),
            prefault: None,
            run: true,
        };
        send(control, Command::Restore(Box::new(spec)), &attach)
    }
}

fn wait_for_all(
    epoll: &impl AsFd,
    children: &[Channel],
    started: &[Instant],
    each: &mut [Option<Duration>],
) -> anyhow::Result<()> {
    let mut left = children.len();
    let mut events = Vec::with_capacity(256);
    while left > 0 {
        events.clear();
        epoll::wait(epoll, rustix::buffer::spare_capacity(&mut events), None)?;
        for event in events.drain(..) {
            let at = usize::try_from(event.data.u64())?;
            while let Some(message) = receive(&children[at])? {
                match message {
                    FromVmm::Event(Event::AgentReady) if each[at].is_none() => {
                        each[at] = Some(started[at].elapsed());
                        left -= 1;
                    }
                    FromVmm::Event(Event::Stopped { cause }) => bail!("a child stopped: {cause:?}"),
                    FromVmm::Response(response) => {
                        response.result.context("a child did not start")?;
                    }
                    FromVmm::Event(_) => {}
                }
            }
        }
    }
    Ok(())
}

fn send(control: &Channel, command: Command, attach: &Attach<'_>) -> anyhow::Result<()> {
    Ok(control.send(&encode(&Request { seq: 1, command })?, attach.fds())?)
}

/// Sends a command and waits for its answer.
fn ask(
    control: &Channel,
    command: Command,
    attach: &Attach<'_>,
) -> anyhow::Result<Option<CutReport>> {
    send(control, command, attach)?;
    let begun = Instant::now();
    while begun.elapsed() < ANSWER_LIMIT {
        match receive(control)? {
            Some(FromVmm::Response(response)) => {
                return match response.result? {
                    Reply::Cut(report) => Ok(Some(report)),
                    _ => Ok(None),
                };
            }
            Some(FromVmm::Event(_)) => {}
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    bail!("a VMM did not answer")
}

/// The next message if there is one: control sockets handed out by `forkd-spawn` do not block.
fn receive(control: &Channel) -> anyhow::Result<Option<FromVmm>> {
    let mut buffer = [0; MAX_MESSAGE];
    match control.recv(&mut buffer) {
        Ok(packet) => Ok(Some(decode(&buffer[..packet.len])?)),
        Err(ChannelError::Io(error)) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error.into()),
    }
}
