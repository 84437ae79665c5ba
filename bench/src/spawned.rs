//! A private `forkd-spawn`, used over its socket without an async runtime.
//!
//! The connection is blocking, so that the benchmark measures the spawner and not a scheduler.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use forkd_sys::Channel;
use forkd_types::SandboxId;
use forkd_vmm_proto::spawn::{
    FromSpawn, Jail, Limits, MAX_BATCH, SPAWN_VERSION, SpawnCommand, SpawnReply, SpawnRequest,
    SpawnStatus,
};
use forkd_vmm_proto::{MAX_MESSAGE, Shape, decode, encode};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};

/// Time in which the pool must fill, also on slow hosts.
const FILL_LIMIT: Duration = Duration::from_secs(120);

/// The process and the connection to it. Dropping it ends the process and its VMMs.
#[derive(Debug)]
pub struct Spawned {
    process: Child,
    channel: Channel,
    seq: u64,
    next_id: u64,
}

impl Spawned {
    /// Starts the `forkd-spawn` beside this program.
    pub fn start(work: &Path) -> anyhow::Result<Self> {
        let path = work.join("spawn.sock");
        let process = Command::new(beside("forkd-spawn")?)
            .arg("--socket")
            .arg(&path)
            .args(["--parallel", "64"])
            .spawn()
            .context("forkd-spawn did not start: build it first with `make build`")?;
        let channel = connect_when_there(&path)?;
        let mut spawned = Self {
            process,
            channel,
            seq: 0,
            next_id: 0,
        };
        match spawned
            .ask(SpawnCommand::Hello {
                version: SPAWN_VERSION,
            })?
            .0
        {
            SpawnReply::Hello { .. } => Ok(spawned),
            reply => bail!("forkd-spawn answered {reply:?} to a hello"),
        }
    }

    /// Waits until `depth` shells are ready.
    pub fn fill(&mut self, shape: Shape, depth: u32) -> anyhow::Result<Duration> {
        let begun = Instant::now();
        self.ask(SpawnCommand::SetPool { shape, depth })?;
        while begun.elapsed() < FILL_LIMIT {
            let ready = self.status()?.pools.first().map_or(0, |pool| pool.ready);
            if ready >= depth {
                return Ok(begun.elapsed());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        bail!(
            "{depth} shells did not get ready within {} s",
            FILL_LIMIT.as_secs()
        )
    }

    /// Stops refilling, so that the measured work runs alone.
    pub fn stop_refilling(&mut self, shape: Shape) -> anyhow::Result<()> {
        self.ask(SpawnCommand::SetPool { shape, depth: 0 })?;
        Ok(())
    }

    /// Takes up to one batch of shells.
    pub fn take(&mut self, shape: Shape, n: usize) -> anyhow::Result<Vec<Channel>> {
        let n = n.min(MAX_BATCH);
        let ids = (0..n).map(|_| self.fresh_id()).collect();
        let (reply, sockets) = self.ask(SpawnCommand::Take {
            shape,
            ids,
            limits: Limits::default(),
            jail: Jail::default(),
        })?;
        ensure!(
            matches!(reply, SpawnReply::Taken(_)),
            "forkd-spawn answered {reply:?} to a take"
        );
        // A control socket and a pidfd for each.
        ensure!(
            sockets.len() == 2 * n,
            "{} descriptors for {n} shells",
            sockets.len()
        );
        let controls = sockets.into_iter().step_by(2);
        Ok(controls.map(Channel::from_fd).collect())
    }

    /// Waits until every VM that was handed out has ended.
    pub fn wait_until_none_lives(&mut self) -> anyhow::Result<()> {
        let begun = Instant::now();
        while self.status()?.live > 0 {
            ensure!(begun.elapsed() < FILL_LIMIT, "VMMs do not end");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// The state of the pools.
    fn status(&mut self) -> anyhow::Result<SpawnStatus> {
        match self.ask(SpawnCommand::Status)?.0 {
            SpawnReply::Status(status) => Ok(status),
            reply => bail!("forkd-spawn answered {reply:?} to a question for its status"),
        }
    }

    fn fresh_id(&mut self) -> SandboxId {
        self.next_id += 1;
        SandboxId::from_parts(0, self.next_id)
    }

    fn ask(&mut self, command: SpawnCommand) -> anyhow::Result<(SpawnReply, Vec<OwnedFd>)> {
        self.seq += 1;
        self.channel.send(
            &encode(&SpawnRequest {
                seq: self.seq,
                command,
            })?,
            &[],
        )?;
        let mut buffer = vec![0; MAX_MESSAGE];
        loop {
            let packet = self.channel.recv(&mut buffer)?;
            match decode::<FromSpawn>(&buffer[..packet.len])? {
                FromSpawn::Response { seq, result } if seq == self.seq => {
                    return Ok((result?, packet.fds));
                }
                _ => {}
            }
        }
    }
}

impl Drop for Spawned {
    fn drop(&mut self) {
        // Both calls fail only if the process has ended already. Its VMMs end when its sockets close.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The path of a program in the folder of this one.
pub fn beside(name: &str) -> anyhow::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(name))
}

fn connect_when_there(path: &Path) -> anyhow::Result<Channel> {
    let address = SocketAddrUnix::new(path)?;
    let begun = Instant::now();
    loop {
        let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
        match connect(&socket, &address) {
            Ok(()) => return Ok(Channel::from_fd(socket)),
            Err(error) if begun.elapsed() > Duration::from_secs(10) => {
                return Err(io::Error::from(error)).context("forkd-spawn does not listen");
            }
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}
