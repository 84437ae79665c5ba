//! A running sandbox that changes a requested amount of its memory.
//!
//! A Python program in the warm interpreter (`guest.py`) does the work in the guest.

use std::time::Duration;

use anyhow::Context;
use forkd_api::SandboxInfo;
use forkd_types::MiB;

use crate::daemon::Daemon;

/// The program that is loaded into the interpreter.
const PROGRAM: &str = include_str!("guest.py");

/// Memory that one call changes. Larger calls would exceed their timeout on slow hosts.
const PIECE_MIB: u32 = 16;

/// A sandbox with the program loaded.
pub struct Source<'a> {
    daemon: &'a Daemon,
    info: SandboxInfo,
}

impl<'a> Source<'a> {
    /// Starts a sandbox from a warm parent, with room for this amount of change.
    pub async fn start(daemon: &'a Daemon, parent: &str, room: MiB) -> anyhow::Result<Self> {
        let source = Self {
            info: daemon.start(parent).await?,
            daemon,
        };
        source.eval(PROGRAM).await?;
        source.eval(&format!("bench_room({})", room.0)).await?;
        source.dirty(room).await?;
        Ok(source)
    }

    /// A child of such a sandbox, which has the program already.
    pub fn from(daemon: &'a Daemon, info: SandboxInfo) -> Self {
        Self { daemon, info }
    }

    pub fn id(&self) -> &str {
        &self.info.id
    }

    /// Starts a process in the guest that reads the clock for this time.
    pub async fn watch(&self, long: Duration) -> anyhow::Result<()> {
        self.eval(&format!("bench_watch({})", long.as_millis()))
            .await?;
        Ok(())
    }

    /// Waits for that process. Returns the longest interval between two reads of the clock.
    pub async fn longest_gap(&self) -> anyhow::Result<Duration> {
        let answer = self.eval("bench_gap()").await?;
        let nanos = answer
            .parse()
            .with_context(|| format!("{answer:?} is no gap"))?;
        Ok(Duration::from_nanos(nanos))
    }

    /// Changes every page of this amount of memory.
    pub async fn dirty(&self, much: MiB) -> anyhow::Result<()> {
        for begin in (0..much.0).step_by(PIECE_MIB as usize) {
            let end = much.0.min(begin + PIECE_MIB);
            self.eval(&format!("bench_dirty({begin}, {end})")).await?;
        }
        Ok(())
    }

    /// Writes a file and syncs it.
    pub async fn file(&self, number: usize, kib: u32) -> anyhow::Result<()> {
        self.eval(&format!("bench_file({number}, {kib})")).await?;
        Ok(())
    }

    async fn eval(&self, code: &str) -> anyhow::Result<String> {
        self.daemon.eval(self.id(), code).await
    }

    /// The sandbox without the program's functions.
    pub fn into_info(self) -> SandboxInfo {
        self.info
    }

    /// Deletes the sandbox.
    pub async fn end(self) {
        self.daemon.end(vec![self.info]).await;
    }
}
