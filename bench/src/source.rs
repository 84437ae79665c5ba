//! A running sandbox that changes as much of itself as it is told.

use std::time::Duration;

use anyhow::Context;
use forkd_api::SandboxInfo;
use forkd_types::MiB;

use crate::daemon::Daemon;

/// What the interpreter learns.
const PROGRAM: &str = include_str!("guest.py");

/// What one call changes: slow machines have a limit on its time, too.
const PIECE_MIB: u32 = 16;

/// A sandbox with the program in it.
pub struct Source<'a> {
    daemon: &'a Daemon,
    info: SandboxInfo,
}

impl<'a> Source<'a> {
    /// Starts one from a warm parent, with room for so much change.
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

    /// One that was started from a cut of such a source, and so has the program.
    pub fn from(daemon: &'a Daemon, info: SandboxInfo) -> Self {
        Self { daemon, info }
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.info.id
    }

    /// For so long a process of the guest reads the clock all the time.
    pub async fn watch(&self, long: Duration) -> anyhow::Result<()> {
        self.eval(&format!("bench_watch({})", long.as_millis()))
            .await?;
        Ok(())
    }

    /// When that is over: the longest time between two looks at the clock.
    pub async fn longest_gap(&self) -> anyhow::Result<Duration> {
        let answer = self.eval("bench_gap()").await?;
        let nanos = answer
            .parse()
            .with_context(|| format!("{answer:?} is no gap"))?;
        Ok(Duration::from_nanos(nanos))
    }

    /// Changes every page of so much memory.
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

    /// Ends it.
    pub async fn end(self) {
        self.daemon.end(vec![self.info]).await;
    }
}
