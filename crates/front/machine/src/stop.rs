//! Stops and removes machines.
//!
//! A stop tries three ways in turn, each with a timeout: the agent powers off, QEMU quits, SIGKILL.

use std::fs;
use std::io;
use std::time::Duration;

use serde::Serialize;

use crate::error::{MachineError, file};
use crate::machine::{Machine, kill};
use crate::process::ProcessHandle;
use crate::progress::Progress;
use crate::qmp::Qmp;
use crate::record::Record;
use crate::seed;
use crate::session::Session;

/// Timeout for the agent to end all processes in the machine.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(30);
/// Timeout for QEMU to write its disks.
const QUIT_LIMIT: Duration = Duration::from_secs(10);
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// How a machine was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stopped {
    /// The machine did not run.
    NotRunning,
    /// The agent ended all processes and powered off.
    Clean,
    /// The machine did not power off, and QEMU quit on request.
    Quit,
    /// QEMU was killed.
    Killed,
}

impl Machine {
    /// Stops the machine: power-off, then QEMU's `quit`, then SIGKILL.
    pub async fn stop(&self, progress: &dyn Progress) -> Result<Stopped, MachineError> {
        if !self.layout.root().exists() {
            return Ok(Stopped::NotRunning);
        }
        let _lock = self.lock(progress).await?;
        self.stop_locked().await
    }

    async fn stop_locked(&self) -> Result<Stopped, MachineError> {
        let Some(record) = self.live_record()? else {
            self.clear_remains()?;
            return Ok(Stopped::NotRunning);
        };
        let stopped = self
            .end(&record)
            .await
            .map_err(file("stop", self.layout.root()))?;
        self.clear_remains()?;
        Ok(stopped)
    }

    async fn end(&self, record: &Record) -> io::Result<Stopped> {
        let Some(handle) = record.qemu.handle()? else {
            return Ok(Stopped::Clean);
        };
        if self.shut_down(record).await {
            let (handle, ended) = wait(handle, SHUTDOWN_LIMIT).await?;
            if ended {
                return Ok(Stopped::Clean);
            }
            return self.quit_or_kill(handle, record).await;
        }
        self.quit_or_kill(handle, record).await
    }

    /// Asks the agent to power off. Returns `false` if the agent cannot be reached.
    async fn shut_down(&self, record: &Record) -> bool {
        let Ok(token) = seed::read_token(&self.layout.token()) else {
            return false;
        };
        match Session::open(record.agent_port, &token, CONNECT_LIMIT).await {
            Ok(session) => session.power_off(CONNECT_LIMIT).await,
            Err(_) => false,
        }
    }

    async fn quit_or_kill(&self, handle: ProcessHandle, record: &Record) -> io::Result<Stopped> {
        let asked = Qmp::connect(&self.layout.qmp()).is_ok_and(|mut qmp| qmp.quit().is_ok());
        if asked && wait(handle, QUIT_LIMIT).await?.1 {
            return Ok(Stopped::Quit);
        }
        kill(&record.qemu)?;
        Ok(Stopped::Killed)
    }

    /// Removes the machine with its data. A running machine is stopped if `force` is set, and is an error
    /// otherwise. Returns `false` if there was no machine.
    pub async fn remove(&self, force: bool, progress: &dyn Progress) -> Result<bool, MachineError> {
        if !self.layout.root().exists() {
            return Ok(false);
        }
        let lock = self.lock(progress).await?;
        let running = match self.live_record() {
            Ok(record) => record.is_some(),
            // A record that cannot be read must not keep a machine from being removed.
            Err(_) if force => false,
            Err(error) => return Err(error),
        };
        if running && !force {
            return Err(MachineError::Running {
                name: self.name.to_string(),
            });
        }
        if running {
            self.stop_locked().await?;
        } else {
            self.clear_remains()?;
        }
        let root = self.layout.root();
        fs::remove_dir_all(root).map_err(file("remove", root))?;
        let path = self.layout.lock();
        fs::remove_file(&path).map_err(file("remove", &path))?;
        drop(lock);
        Ok(true)
    }
}

async fn wait(handle: ProcessHandle, limit: Duration) -> io::Result<(ProcessHandle, bool)> {
    tokio::task::spawn_blocking(move || handle.wait(limit).map(|ended| (handle, ended)))
        .await
        .map_err(io::Error::other)?
}
