//! [`Vm`]: a running VM with its VMM.
//!
//! A `Vm` keeps track of the disks and of the image that the next cut is based on. Dropping it kills the VMM.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use forkd_vmm_link::{Vmm, VmmEvents};
use forkd_vmm_proto::spawn::{HowEnded, Vm as Process};
use forkd_vmm_proto::{Command, Event, Reply, StopCause};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::cut::Base;
use crate::ends::Ends;
use crate::{Disk, Fds, procfs};

/// Timeout for a boot on a slow, loaded host.
const READY_LIMIT: Duration = Duration::from_secs(200);
/// Timeout for the report of a process's end.
const END_LIMIT: Duration = Duration::from_secs(60);

/// A VM and its VMM. Dropping it kills the VMM, unless it was [released](Self::release).
#[derive(Debug)]
pub struct Vm {
    /// The VMM process.
    pub process: Process,
    pub vmm: Vmm,
    pidfd: Option<OwnedFd>,
    events: Mutex<VmmEvents>,
    ends: Arc<Ends>,
    folder: PathBuf,
    disks: Mutex<Vec<Disk>>,
    base: Mutex<Option<Base>>,
}

/// The parts of a [`Vm`].
pub(crate) struct Parts {
    pub process: Process,
    pub vmm: Vmm,
    pub events: VmmEvents,
    pub ends: Arc<Ends>,
    pub folder: PathBuf,
}

impl Vm {
    pub(crate) fn new(parts: Parts) -> anyhow::Result<Self> {
        let pid = Pid::from_raw(parts.process.pid.cast_signed()).context("0 is no process id")?;
        Ok(Self {
            pidfd: Some(pidfd_open(pid, PidfdFlags::empty())?),
            process: parts.process,
            vmm: parts.vmm,
            events: Mutex::new(parts.events),
            ends: parts.ends,
            folder: parts.folder,
            disks: Mutex::default(),
            base: Mutex::default(),
        })
    }

    /// Notes what the machine was filled with.
    pub(crate) async fn filled(&self, disks: Vec<Disk>) {
        *self.disks.lock().await = disks;
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn pid(&self) -> u32 {
        self.process.pid
    }

    /// The vsock socket of the VM.
    pub fn agent_socket(&self) -> PathBuf {
        self.folder.join("vsock.sock")
    }

    /// The disks as they are now, to boot another VM from.
    pub async fn disks(&self) -> Vec<Disk> {
        self.disks.lock().await.clone()
    }

    /// The image that a cut of changed pages builds on; none for a VM that was booted and never cut.
    pub(crate) async fn base(&self) -> tokio::sync::MutexGuard<'_, Option<Base>> {
        self.base.lock().await
    }

    /// Locks the disks for a change.
    pub(crate) async fn disks_now(&self) -> tokio::sync::MutexGuard<'_, Vec<Disk>> {
        self.disks.lock().await
    }

    /// The output on the serial console.
    pub fn console(&self) -> String {
        let bytes = std::fs::read(self.folder.join("console.log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits for the ready signal that the agent sends once, after the boot.
    pub async fn wait_ready(&self) -> anyhow::Result<()> {
        self.wait_event(READY_LIMIT, |event| matches!(event, Event::AgentReady))
            .await
            .with_context(|| {
                format!(
                    "the agent did not get ready; the console says:\n{}",
                    self.console()
                )
            })?;
        Ok(())
    }

    /// Waits for an event and skips others. Fails if the VM stops.
    pub async fn wait_event(
        &self,
        limit: Duration,
        wanted: impl Fn(&Event) -> bool,
    ) -> anyhow::Result<Event> {
        let mut events = self.events.lock().await;
        timeout(limit, async {
            loop {
                match events.next().await {
                    Some(event) if wanted(&event.event) => return Ok(event.event),
                    Some(event) => {
                        if let Event::Stopped { cause } = event.event {
                            bail!("the VM stopped: {cause:?}");
                        }
                    }
                    None => bail!("the VMM is gone"),
                }
            }
        })
        .await
        .context("no such event in time")?
    }

    /// Waits until the VM has stopped by itself. Returns the cause and the end of the process.
    pub async fn wait_stopped(&self) -> anyhow::Result<(StopCause, HowEnded)> {
        let event = self
            .wait_event(READY_LIMIT, |event| matches!(event, Event::Stopped { .. }))
            .await?;
        let Event::Stopped { cause } = event else {
            bail!("{event:?} is no stop");
        };
        Ok((cause, self.wait_end().await?))
    }

    /// Waits until `forkd-spawn` reports the end of the process.
    pub async fn wait_end(&self) -> anyhow::Result<HowEnded> {
        timeout(END_LIMIT, self.ends.of(&self.process.id))
            .await
            .context("the end of the VMM was not reported")
    }

    /// Ends the VM and waits for the end of its process.
    pub async fn stop(&self) -> anyhow::Result<HowEnded> {
        // The VMM may exit before its response is read.
        let _ = self.vmm.call(Command::Stop, &[]).await;
        self.wait_end().await
    }

    pub fn kill(&self) {
        if let Some(pidfd) = &self.pidfd {
            // The only possible failure is that the process has ended already.
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
    }

    /// Kills the VMM and removes the VM's folder and its top layers.
    pub async fn remove(self) -> anyhow::Result<()> {
        self.kill();
        // The `forkd-spawn` that would report the end may be gone.
        let gone = async {
            while procfs::is_alive(self.pid()) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(END_LIMIT, gone)
            .await
            .context("a killed VMM does not end")?;
        for disk in self.disks_now().await.iter().filter(|disk| !disk.read_only) {
            let top = disk.layers.last().context("a disk without a layer")?;
            std::fs::remove_file(top)?;
        }
        std::fs::remove_dir_all(self.folder())?;
        Ok(())
    }

    /// Gives up the VM without ending it: `forkd-spawn` still holds its control socket.
    pub fn release(mut self) -> Process {
        self.pidfd = None;
        self.process.clone()
    }

    /// Writes the list of pages that the guest has touched since the restore.
    pub async fn working_set(&self, path: &Path) -> anyhow::Result<()> {
        let mut fds = Fds::default();
        let output = fds.add(File::create(path)?);
        let command = Command::WorkingSet { output };
        self.vmm.run(command, &fds.borrow()).await?;
        Ok(())
    }

    /// A counter of the VMM by name; 0 if it was never incremented.
    pub async fn counter(&self, name: &str) -> anyhow::Result<u64> {
        let counters = self.counters().await?;
        let found = counters.iter().find(|(counter, _)| counter == name);
        Ok(found.map_or(0, |(_, value)| *value))
    }

    pub async fn counters(&self) -> anyhow::Result<Vec<(String, u64)>> {
        match self.vmm.call(Command::Counters, &[]).await? {
            Reply::Counters(counters) => Ok(counters.0),
            reply => bail!("the VMM answered {reply:?} to a question for counters"),
        }
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.kill();
    }
}
