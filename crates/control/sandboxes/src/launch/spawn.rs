//! The connection to `forkd-spawn`.
//!
//! [`Launcher`] starts the program if it does not run, and connects again after a failure. It keeps the pidfd of each
//! VM, so that a VM can be ended without `forkd-spawn`. A VM whose process is known to live is never reported as ended.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forkd_api::{Isolation, MissingWall};
use forkd_types::{Digest, Engine, SandboxId};
use forkd_vmm_link::{Endings, LinkError, Process, Spawner, SpawnerError, Taken, end_spawner};
use forkd_vmm_proto::Shape;
use forkd_vmm_proto::spawn::{Jail, Limits, SpawnError, SpawnStatus, Vm};
use parking_lot::Mutex;

use super::program::{self, NotStarted};

/// A VM that runs or stands ready, and its control socket.
#[derive(Debug)]
pub struct StartedVm {
    /// The VM as `forkd-spawn` reports it.
    pub vm: Vm,
    /// The controller's end, for [`forkd_vmm_link::Vmm::new`].
    pub control: OwnedFd,
}

/// Where VMM processes come from.
#[derive(Debug)]
pub struct Launcher {
    program: PathBuf,
    /// Arguments of the program beside its socket.
    arguments: Vec<OsString>,
    socket: PathBuf,
    current: Mutex<Option<Arc<Spawner>>>,
    /// One connects at a time. True once `forkd-spawn` was ended for good.
    connecting: tokio::sync::Mutex<bool>,
    endings: tokio::sync::mpsc::UnboundedSender<Endings>,
    /// The processes of VMs that were started and not ended by [`Launcher::kill`].
    processes: Mutex<HashMap<SandboxId, Arc<Process>>>,
    /// Names of kept descriptors that nothing needs and that `forkd-spawn` may still have.
    unreleased: Mutex<HashSet<Digest>>,
    /// The shape of which shells stand ready.
    ready: tokio::sync::Mutex<Option<Shape>>,
}

impl Launcher {
    /// Does not connect yet. Each new connection's stream of ends goes to `endings`.
    pub fn new(
        program: PathBuf,
        arguments: Vec<OsString>,
        socket: PathBuf,
        endings: tokio::sync::mpsc::UnboundedSender<Endings>,
    ) -> Self {
        Self {
            program,
            arguments,
            socket,
            current: Mutex::new(None),
            connecting: tokio::sync::Mutex::new(false),
            endings,
            processes: Mutex::default(),
            unreleased: Mutex::default(),
            ready: tokio::sync::Mutex::new(None),
        }
    }

    /// Where `forkd-spawn` listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The engines that VMs of this host can run on.
    pub async fn engines(&self) -> Result<Vec<Engine>, SpawnerError> {
        Ok(self.connected().await?.engines().to_vec())
    }

    /// The walls around every VM.
    pub async fn isolation(&self) -> Result<Isolation, SpawnerError> {
        let spawner = self.connected().await?;
        let missing = spawner.missing_walls().iter().map(|missing| MissingWall {
            wall: missing.wall.clone(),
            reason: Some(missing.reason.clone()),
        });
        Ok(Isolation {
            walls: spawner
                .walls()
                .iter()
                .map(|wall| wall.name().to_owned())
                .collect(),
            missing: missing.collect(),
        })
    }

    /// Takes one shell for each ID, under limits that this host can keep. A shell that could not be made is missing
    /// from the answer; after a failure some may have been made all the same.
    pub async fn take(
        &self,
        shape: Shape,
        ids: &[SandboxId],
        limits: &Limits,
    ) -> Result<Vec<StartedVm>, SpawnerError> {
        let spawner = self.connected().await?;
        let taken = self.noted(spawner.take(shape, ids, limits, Jail::default()).await)?;
        Ok(self.remember(taken))
    }

    /// Replaces the limits of a live VM.
    pub async fn set_limits(&self, id: &SandboxId, limits: Limits) -> Result<(), SpawnerError> {
        let spawner = self.connected().await?;
        self.noted(spawner.set_limits(id, limits).await)
    }

    /// Keeps the pidfd of each VM, so that the VM can be ended without `forkd-spawn`.
    fn remember(&self, taken: Vec<Taken>) -> Vec<StartedVm> {
        let mut processes = self.processes();
        taken
            .into_iter()
            .map(|taken| {
                processes.insert(taken.vm.id.clone(), Arc::new(taken.process));
                StartedVm {
                    vm: taken.vm,
                    control: taken.control,
                }
            })
            .collect()
    }

    /// The control sockets of every VM that lives.
    pub async fn adopt(&self) -> Result<Vec<StartedVm>, SpawnerError> {
        let spawner = self.connected().await?;
        let taken = self.noted(spawner.adopt().await)?;
        Ok(self.remember(taken))
    }

    /// Leaves copies of descriptors with `forkd-spawn`, where a later daemon finds them.
    pub async fn keep(&self, files: &[(Digest, BorrowedFd<'_>)]) -> Result<(), SpawnerError> {
        let spawner = self.connected().await?;
        self.noted(spawner.keep(files).await)
    }

    /// Closes the kept descriptors of these names, and of names whose release failed before.
    pub async fn release(&self, names: Vec<Digest>) -> Result<(), SpawnerError> {
        let names: Vec<Digest> = {
            let mut unreleased = self.unreleased();
            unreleased.extend(names);
            unreleased.iter().copied().collect()
        };
        if names.is_empty() {
            return Ok(());
        }
        let spawner = self.connected().await?;
        self.noted(spawner.release(&names).await)?;
        let mut unreleased = self.unreleased();
        for name in names {
            unreleased.remove(&name);
        }
        Ok(())
    }

    /// The descriptors that an earlier daemon left.
    pub async fn kept(&self) -> Result<Vec<(Digest, OwnedFd)>, SpawnerError> {
        let spawner = self.connected().await?;
        self.noted(spawner.kept().await)
    }

    /// Ends a VM's process. One that is gone already is no error.
    ///
    /// [`SpawnerError::StillThere`] means that the process is known to live; its resources must not be given away.
    pub async fn kill(&self, id: &SandboxId) -> Result<(), SpawnerError> {
        let asked = match self.connected().await {
            Ok(spawner) => self.noted(spawner.kill(id).await),
            Err(error) => Err(error),
        };
        let asked = match asked {
            // A `forkd-spawn` that was started after the VM does not know it.
            Err(SpawnerError::Refused(SpawnError::Unknown { .. })) => Ok(()),
            other => other,
        };
        let known = self.processes().get(id).cloned();
        let Some(process) = known else {
            return asked;
        };
        if let Err(error) = process.end().await {
            tracing::error!(sandbox = %id, %error, "the VMM process does not end");
            return Err(SpawnerError::StillThere { id: id.clone() });
        }
        self.processes().remove(id);
        Ok(())
    }

    /// Keeps so many shells of a shape ready, and none of any other shape.
    pub async fn keep_ready(&self, shape: Shape, depth: u32) -> Result<(), SpawnerError> {
        let mut ready = self.ready.lock().await;
        if *ready != Some(shape) {
            // Asked for, since an earlier daemon may have filled others.
            for pool in self.status().await?.pools {
                if pool.shape != shape {
                    self.set_pool(pool.shape, 0).await?;
                }
            }
            *ready = Some(shape);
        }
        self.set_pool(shape, depth).await
    }

    async fn set_pool(&self, shape: Shape, depth: u32) -> Result<(), SpawnerError> {
        let spawner = self.connected().await?;
        self.noted(spawner.set_pool(shape, depth).await)
    }

    /// How the pools stand.
    pub async fn status(&self) -> Result<SpawnStatus, SpawnerError> {
        let spawner = self.connected().await?;
        self.noted(spawner.status().await)
    }

    /// The same without starting `forkd-spawn`: an error if the daemon has no connection to it and finds none.
    pub async fn peek(&self) -> Result<SpawnStatus, SpawnerError> {
        let current = self.slot().clone();
        match current {
            Some(spawner) => self.noted(spawner.status().await),
            None => {
                let (spawner, _endings) = Spawner::connect(&self.socket).await?;
                spawner.status().await
            }
        }
    }

    /// Ends `forkd-spawn` and every VMM it has. No other is started, whether one ran or not.
    pub async fn end(&self) -> std::io::Result<()> {
        let mut ended = self.connecting.lock().await;
        *ended = true;
        self.disconnected();
        self.end_process().await
    }

    async fn end_process(&self) -> std::io::Result<()> {
        let path = self.socket.clone();
        tokio::task::spawn_blocking(move || end_spawner(&path))
            .await
            .map_err(std::io::Error::other)?
    }

    /// Forgets the connection, so that the next use makes a new one.
    pub fn disconnected(&self) {
        self.slot().take();
    }

    /// A connection that failed is not used again.
    fn noted<T>(&self, result: Result<T, SpawnerError>) -> Result<T, SpawnerError> {
        if matches!(
            result,
            Err(SpawnerError::Link(_) | SpawnerError::Late { .. })
        ) {
            self.disconnected();
        }
        result
    }

    async fn connected(&self) -> Result<Arc<Spawner>, SpawnerError> {
        if let Some(spawner) = self.slot().clone() {
            return Ok(spawner);
        }
        let ended = self.connecting.lock().await;
        if *ended {
            return Err(LinkError::Closed.into());
        }
        if let Some(spawner) = self.slot().clone() {
            return Ok(spawner);
        }
        let (spawner, endings) = match Spawner::connect(&self.socket).await {
            Ok(connected) => connected,
            Err(SpawnerError::Refused(SpawnError::Version { ours, theirs })) => {
                tracing::warn!(
                    found = ours,
                    wanted = theirs,
                    "forkd-spawn is of another version; it ends, with the sandboxes it has"
                );
                self.end_process()
                    .await
                    .map_err(|source| SpawnerError::Connect {
                        path: self.socket.clone(),
                        source,
                    })?;
                self.start().await?
            }
            // One that listens and does not answer still has its VMs: a second one would kill them.
            Err(late @ SpawnerError::Late { .. }) => return Err(late),
            Err(_) => self.start().await?,
        };
        tracing::info!(walls = ?spawner.walls(), "walls around every VM");
        for missing in spawner.missing_walls() {
            tracing::warn!(
                wall = missing.wall,
                reason = missing.reason,
                "a wall does not stand"
            );
        }
        let spawner = Arc::new(spawner);
        *self.slot() = Some(Arc::clone(&spawner));
        // The receiver lives as long as the daemon does.
        let _ = self.endings.send(endings);
        Ok(spawner)
    }

    async fn start(&self) -> Result<(Spawner, Endings), SpawnerError> {
        program::start(
            &self.program,
            &self.socket,
            &self.arguments,
            async |socket: &Path| Spawner::connect(socket).await,
            |error| matches!(error, SpawnerError::Late { .. }),
        )
        .await
        .map_err(|error| match error {
            NotStarted::Io(source) => SpawnerError::Connect {
                path: self.program.clone(),
                source,
            },
            NotStarted::Connect(error) => error,
        })
    }

    fn processes(&self) -> parking_lot::MutexGuard<'_, HashMap<SandboxId, Arc<Process>>> {
        self.processes.lock()
    }

    fn unreleased(&self) -> parking_lot::MutexGuard<'_, HashSet<Digest>> {
        self.unreleased.lock()
    }

    fn slot(&self) -> parking_lot::MutexGuard<'_, Option<Arc<Spawner>>> {
        self.current.lock()
    }
}
