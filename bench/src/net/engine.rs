//! The network engine as a process in the world, and its controller.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use forkd_net_proto::{
    FdIndex, FromNet, NET_VERSION, NetCommand, NetReply, NetRequest, decode, encode,
};
use forkd_sys::Channel;
use forkd_types::{Mode, NetLimits, Policy};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, socketpair,
    sockopt,
};
use serde::Serialize;

use super::world::{WORLD, World};
use crate::stats::{Spread, millis};

/// The buffer of each end of a frame socket, as the daemon sets it.
const FRAME_BUFFER: usize = 1 << 20;
const START: Duration = Duration::from_secs(20);

pub struct Engine {
    process: Child,
    control: Channel,
    _folder: tempfile::TempDir,
}

/// The cost of sandboxes that do nothing.
#[derive(Debug, Serialize)]
pub struct Attach {
    sandboxes: u32,
    /// One after another: socket pair, message, answer.
    each_ms: Spread,
    /// All messages first, then all answers.
    all_ms: f64,
    /// Closing all frame sockets until the engine has forgotten all of them.
    end_ms: f64,
    /// Resident memory of the engine per sandbox.
    engine_kib: f64,
    /// Kernel memory per sandbox; other work on the host disturbs it.
    kernel_kib: f64,
}

impl Attach {
    pub fn text(&self) -> String {
        let n = self.sandboxes;
        format!(
            "attach one, ms p50 / p99           {:>10.3} {:>12.3}\n\
             attach {n} at once, ms           {:>12.1}\n\
             end {n} at once, ms              {:>12.1}\n\
             idle sandbox, KiB engine / kernel  {:>10.1} {:>12.1}\n",
            self.each_ms.p50,
            self.each_ms.p99,
            self.all_ms,
            self.end_ms,
            self.engine_kib,
            self.kernel_kib
        )
    }
}

impl Engine {
    pub fn start(program: &Path, world: &World) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let socket = folder.path().join("net.sock");
        let process = Command::new("ip")
            .args(["netns", "exec", &world.name(WORLD)])
            .arg(program)
            .arg("--socket")
            .arg(&socket)
            .spawn()
            .context("cannot start the engine")?;
        let mut engine = Self {
            control: dial(&socket)?,
            process,
            _folder: folder,
        };
        let hello = NetCommand::Hello {
            version: NET_VERSION,
        };
        match engine.ask(0, hello, &[])? {
            NetReply::Hello { .. } => Ok(engine),
            other => bail!("the engine answered {other:?}"),
        }
    }

    fn send(&self, seq: u64, command: NetCommand, fds: &[BorrowedFd<'_>]) -> anyhow::Result<()> {
        let request = NetRequest { seq, command };
        Ok(self.control.send(&encode(&request)?, fds)?)
    }

    fn receive(&self) -> anyhow::Result<NetReply> {
        let mut buffer = vec![0; forkd_net_proto::MAX_MESSAGE];
        loop {
            let got = self.control.recv(&mut buffer)?;
            if let FromNet::Response { result, .. } = decode(&buffer[..got.len])? {
                return Ok(result?);
            }
        }
    }

    fn ask(
        &mut self,
        seq: u64,
        command: NetCommand,
        fds: &[BorrowedFd<'_>],
    ) -> anyhow::Result<NetReply> {
        self.send(seq, command, fds)?;
        self.receive()
    }

    fn command(id: &str) -> anyhow::Result<NetCommand> {
        // The latency of connections is measured, not their limit.
        let limits = NetLimits {
            new_per_second: u32::MAX,
            ..NetLimits::default()
        };
        Ok(NetCommand::Attach {
            id: id.parse()?,
            policy: Policy::new(Mode::Custom, vec!["allow host".parse()?], limits)?,
            brokered: Vec::new(),
            generation: 1,
            frames: FdIndex(0),
        })
    }

    /// Attaches one sandbox and returns both ends of its frame socket.
    pub fn attach(&self, id: &str) -> anyhow::Result<(OwnedFd, OwnedFd)> {
        let (guest, engine) = pair()?;
        self.send(1, Self::command(id)?, &[engine.as_fd()])?;
        self.receive()?;
        Ok((guest, engine))
    }

    /// Attaches many sandboxes in two ways, and measures an idle one.
    pub fn attach_many(&self, count: u32) -> anyhow::Result<Attach> {
        // Memory of sandboxes that ended is used again, so the first ones are measured.
        let (before, slab) = (self.resident()?, slab()?);
        let mut each = Vec::new();
        let mut guests = Vec::new();
        for number in 0..count {
            let start = Instant::now();
            let (guest, engine) = self.attach(&format!("sb-{number}"))?;
            drop(engine);
            each.push(start.elapsed());
            guests.push(guest);
        }
        let kib = |now: u64, then: u64| (now as f64 - then as f64) / f64::from(count);
        let (engine_kib, kernel_kib) = (kib(self.resident()?, before), kib(self::slab()?, slab));
        self.end_all(guests)?;
        let start = Instant::now();
        let mut guests = Vec::new();
        for number in 0..count {
            let (guest, engine) = pair()?;
            self.send(
                1,
                Self::command(&format!("sb-{number}"))?,
                &[engine.as_fd()],
            )?;
            guests.push(guest);
        }
        for _ in 0..count {
            self.receive()?;
        }
        let all_ms = millis(start.elapsed());
        Ok(Attach {
            sandboxes: count,
            each_ms: Spread::of(&each),
            all_ms,
            end_ms: self.end_all(guests)?,
            engine_kib,
            kernel_kib,
        })
    }

    /// Closes the guests' ends and waits until the engine serves no sandbox.
    fn end_all(&self, guests: Vec<OwnedFd>) -> anyhow::Result<f64> {
        let start = Instant::now();
        drop(guests);
        loop {
            self.send(2, NetCommand::Totals, &[])?;
            match self.receive()? {
                NetReply::Totals { sandboxes: 0, .. } => return Ok(millis(start.elapsed())),
                NetReply::Totals { .. } => {}
                other => bail!("the engine answered {other:?}"),
            }
        }
    }

    /// The CPU time of the process.
    pub fn cpu(&self) -> anyhow::Result<Duration> {
        let mut all = 0;
        for task in std::fs::read_dir(format!("/proc/{}/task", self.process.id()))? {
            let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
            let first = text.split_whitespace().next().unwrap_or("0");
            all += first.parse::<u64>()?;
        }
        Ok(Duration::from_nanos(all))
    }

    /// Resident KiB of the process.
    fn resident(&self) -> anyhow::Result<u64> {
        number(&format!("/proc/{}/status", self.process.id()), "VmRSS:")
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // A process that has ended already is no failure here.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// KiB of kernel memory on the host.
fn slab() -> anyhow::Result<u64> {
    number("/proc/meminfo", "Slab:")
}

fn number(path: &str, name: &str) -> anyhow::Result<u64> {
    let text = std::fs::read_to_string(path)?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let value = line.and_then(|line| line.split_whitespace().next());
    value
        .and_then(|value| value.parse().ok())
        .with_context(|| format!("{path} has no {name}"))
}

fn pair() -> anyhow::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (one, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    for end in [&one, &other] {
        sockopt::set_socket_send_buffer_size(end, FRAME_BUFFER)?;
    }
    Ok((one, other))
}

fn dial(path: &Path) -> anyhow::Result<Channel> {
    let address = SocketAddrUnix::new(path)?;
    let start = Instant::now();
    loop {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        match connect(&socket, &address) {
            Ok(()) => return Ok(Channel::from_fd(socket)),
            Err(error) if start.elapsed() > START => return Err(error.into()),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}
