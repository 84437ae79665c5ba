//! A running guest.

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

/// How long a guest may take to boot on a slow, loaded machine.
const READY_LIMIT: Duration = Duration::from_secs(200);
/// How long a process may take to be reported as ended.
const END_LIMIT: Duration = Duration::from_secs(60);

/// A VM and its VMM. Dropping it kills the VMM, unless it was [released](Self::release).
#[derive(Debug)]
pub struct Vm {
    /// The VMM process.
    pub process: Process,
    /// Its control socket.
    pub vmm: Vmm,
    pidfd: Option<OwnedFd>,
    events: Mutex<VmmEvents>,
    ends: Arc<Ends>,
    folder: PathBuf,
    disks: Mutex<Vec<Disk>>,
    base: Mutex<Option<Base>>,
}

/// What a [`Vm`] is made of.
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

    /// The VM's own folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The process id of the VMM.
    pub fn pid(&self) -> u32 {
        self.process.pid
    }

    /// The socket that leads to the guest's ports.
    pub fn agent_socket(&self) -> PathBuf {
        self.folder.join("vsock.sock")
    }

    /// Its disks as they are now, to boot another machine from.
    pub async fn disks(&self) -> Vec<Disk> {
        self.disks.lock().await.clone()
    }

    /// What a cut of only what changed builds on; none for a machine that was booted and never cut.
    pub(crate) async fn base(&self) -> tokio::sync::MutexGuard<'_, Option<Base>> {
        self.base.lock().await
    }

    /// Its disks, to be changed.
    pub(crate) async fn disks_now(&self) -> tokio::sync::MutexGuard<'_, Vec<Disk>> {
        self.disks.lock().await
    }

    /// What the guest has printed on its serial console.
    pub fn console(&self) -> String {
        let bytes = std::fs::read(self.folder.join("console.log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits for the ready signal that the agent gives once in its life, after the boot.
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

    /// Waits for an event, passing over others. A VM that stops instead is an error.
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

    /// Waits until the VM has stopped by itself: why, and how its process ended.
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

    /// Ends the VM and waits until its process is gone.
    pub async fn stop(&self) -> anyhow::Result<HowEnded> {
        // The VMM may be gone before its answer is read.
        let _ = self.vmm.call(Command::Stop, &[]).await;
        self.wait_end().await
    }

    /// Kills the VMM process.
    pub fn kill(&self) {
        if let Some(pidfd) = &self.pidfd {
            // The only failure left is that it has ended already.
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
    }

    /// Kills it and removes what is its own: its folder and the layers it writes.
    pub async fn remove(self) -> anyhow::Result<()> {
        self.kill();
        // Not every `forkd-spawn` that could tell is still there.
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

    /// Lets go of the VM without ending it: `forkd-spawn` still holds its socket.
    pub fn release(mut self) -> Process {
        self.pidfd = None;
        self.process.clone()
    }

    /// Writes down which pages the guest has touched since it was restored.
    pub async fn working_set(&self, path: &Path) -> anyhow::Result<()> {
        let mut fds = Fds::default();
        let output = fds.add(File::create(path)?);
        let command = Command::WorkingSet { output };
        self.vmm.run(command, &fds.borrow()).await?;
        Ok(())
    }

    /// A counter of the VMM by name; 0 when it has not been touched.
    pub async fn counter(&self, name: &str) -> anyhow::Result<u64> {
        let counters = self.counters().await?;
        let found = counters.iter().find(|(counter, _)| counter == name);
        Ok(found.map_or(0, |(_, value)| *value))
    }

    /// All counters of the VMM.
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
