//! The product's fork path with a guest of a few bytes.
//!
//! The clock of a child starts when its shell is requested and stops when the signal of its first instruction
//! has arrived. It covers the hand-out of the shell, a console and a socket per child, descriptors, mapping,
//! restore, and the first run.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use forkd_sys::{Channel, ChannelError};
use forkd_types::MiB;
use forkd_vmm_driver::Attach;
use forkd_vmm_proto::{Command, Event, FromVmm, MAX_MESSAGE, Request, decode, encode};
use rustix::event::epoll;

use crate::floor::Burst;
use crate::frozen::{Frozen, Surroundings};
use crate::spawned::Spawned;

/// A frozen tiny guest, and the means to fork it.
#[derive(Debug)]
pub struct Bench {
    spawned: Spawned,
    frozen: Frozen,
    work: PathBuf,
    folders: u64,
}

impl Bench {
    /// Freezes the tiny guest before its first instruction.
    pub fn new(work: &Path, memory: MiB) -> anyhow::Result<Self> {
        Ok(Self {
            spawned: Spawned::start(work)?,
            frozen: Frozen::new(work, memory, &forkd_vmm_driver::tiny::image())?,
            work: work.to_owned(),
            folders: 0,
        })
    }

    /// Forks `n` children at once from pooled shells. Also returns the time in which the pool was filled.
    pub fn burst(&mut self, n: usize) -> anyhow::Result<(Burst, Duration)> {
        let filled = self.spawned.fill(self.frozen.shape, u32::try_from(n)?)?;
        // The shells have just been created. Let the kernel finish that work before the clock starts.
        std::thread::sleep(Duration::from_millis(200));
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut children = Vec::with_capacity(n);
        let mut started = Vec::with_capacity(n);
        let mut each = vec![None; n];
        let begun = Instant::now();
        while children.len() < n {
            let asked = Instant::now();
            for control in self.spawned.take(self.frozen.shape, n - children.len())? {
                started.push(asked);
                self.restore(&control)?;
                let data = epoll::EventData::new_u64(children.len() as u64);
                epoll::add(&epoll, &control, data, epoll::EventFlags::IN)?;
                children.push(control);
            }
        }
        wait_for_all(&epoll, &children, &started, &mut each)?;
        let wall = begun.elapsed();
        self.spawned.stop_refilling(self.frozen.shape)?;
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
        let generation = u128::from(self.folders);
        let spec = self
            .frozen
            .restore(&surroundings, generation, true, &mut attach);
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

/// The next message, if there is one. Control sockets from `forkd-spawn` do not block.
fn receive(control: &Channel) -> anyhow::Result<Option<FromVmm>> {
    let mut buffer = [0; MAX_MESSAGE];
    match control.recv(&mut buffer) {
        Ok(packet) => Ok(Some(decode(&buffer[..packet.len])?)),
        Err(ChannelError::Io(error)) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error.into()),
    }
}
