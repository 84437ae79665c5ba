//! A running guest.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use forkd_guest_client::{Client, Options};
use forkd_guest_proto::ExecRequest;
use forkd_vmm_client::{Vmm, VmmEvents};
use forkd_vmm_proto::spawn::Vm as Process;
use forkd_vmm_proto::{Command, CutSpec, Event, Reply};
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::disk::new_layer;
use crate::{Disk, Fds, Frozen};

/// How long a guest may take to boot on a slow, loaded machine.
const READY_LIMIT: Duration = Duration::from_secs(180);

/// A VM and its VMM. Dropping it ends the VMM.
#[derive(Debug)]
pub struct Vm {
    /// The VMM process.
    pub process: Process,
    /// Its control socket.
    pub vmm: Vmm,
    events: Mutex<VmmEvents>,
    folder: PathBuf,
    disks: Mutex<Vec<Disk>>,
    net: bool,
}

impl Vm {
    pub(crate) fn new(
        process: Process,
        vmm: Vmm,
        events: VmmEvents,
        folder: PathBuf,
        disks: Vec<Disk>,
        net: bool,
    ) -> Self {
        Self {
            process,
            vmm,
            events: Mutex::new(events),
            folder,
            disks: Mutex::new(disks),
            net,
        }
    }

    /// The VM's own folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What the guest has printed on its serial console.
    pub fn console(&self) -> String {
        let bytes = std::fs::read(self.folder.join("console.log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits for the agent's ready signal.
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

    /// Connects to the agent.
    pub async fn agent(&self) -> anyhow::Result<Client> {
        let socket = self.folder.join("vsock.sock");
        Ok(Client::connect_vsock(&socket, forkd_vmm_proto::AGENT_PORT, Options::default()).await?)
    }

    /// Runs a shell command in the guest and gives its standard output; anything but success is an error.
    pub async fn sh(&self, command: &str) -> anyhow::Result<String> {
        let request = ExecRequest {
            shell: Some(command.to_owned()),
            ..Default::default()
        };
        let captured = self.agent().await?.exec_capture(request).await?;
        let stdout = String::from_utf8_lossy(&captured.stdout).into_owned();
        if !captured.result.status.success() {
            let stderr = String::from_utf8_lossy(&captured.stderr);
            bail!(
                "`{command}` ended with {:?}: {stdout}{stderr}",
                captured.result
            );
        }
        Ok(stdout)
    }

    /// Cuts the machine and ends it: what children are made from.
    pub async fn freeze(self) -> anyhow::Result<Frozen> {
        let frozen = self.cut(false).await?;
        self.stop().await?;
        Ok(frozen)
    }

    /// Cuts the machine at one instant while it goes on.
    pub async fn branch(&self) -> anyhow::Result<Frozen> {
        self.cut(true).await
    }

    async fn cut(&self, go_on: bool) -> anyhow::Result<Frozen> {
        let number: u64 = rand::random();
        let state = self.folder.join(format!("cut-{number:x}.state"));
        let memory = self.folder.join(format!("cut-{number:x}.memory"));
        let mut fds = Fds::default();
        let mut disks = self.disks.lock().await;
        let frozen_disks = disks.clone();
        let mut new_layers = Vec::new();
        let mut next = Vec::new();
        for disk in disks.iter() {
            let mut disk = disk.clone();
            if go_on && !disk.read_only {
                let path = self
                    .folder
                    .join(format!("{}-{number:x}.layer", disk.serial));
                new_layers.push(fds.add(new_layer(&disk.base, &path)?));
                disk.layers.push(path);
            }
            next.push(disk);
        }
        let spec = CutSpec {
            state: fds.add(new_file(&state)?),
            memory: fds.add(new_file(&memory)?),
            only_changed: false,
            index: None,
            new_layers,
            resume: go_on,
        };
        let report = match self.vmm.call(Command::Cut(spec), &fds.borrow()).await? {
            Reply::Cut(report) => report,
            reply => bail!("the VMM answered {reply:?} to a cut"),
        };
        *disks = next;
        let shape = self.process.shape;
        Ok(Frozen {
            shape,
            state,
            memory,
            disks: frozen_disks,
            net: self.net,
            report,
        })
    }

    /// Ends the VM.
    pub async fn stop(&self) -> anyhow::Result<()> {
        // The VMM may be gone before its answer is read.
        let _ = self.vmm.call(Command::Stop, &[]).await;
        Ok(())
    }

    /// A counter of the VMM by name; 0 when it has not been touched.
    pub async fn counter(&self, name: &str) -> anyhow::Result<u64> {
        match self.vmm.call(Command::Counters, &[]).await? {
            Reply::Counters(counters) => {
                let found = counters.0.iter().find(|(counter, _)| counter == name);
                Ok(found.map_or(0, |(_, value)| *value))
            }
            reply => bail!("the VMM answered {reply:?} to a question for counters"),
        }
    }
}

fn new_file(path: &Path) -> anyhow::Result<File> {
    Ok(File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)?)
}
