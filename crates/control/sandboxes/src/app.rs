//! The daemon as one value that every request shares.
//!
//! [`App`] holds the state database, the store, the connection to `forkd-spawn`, the limits and the registry of
//! sandboxes. [`App::open`] opens all of them; sandboxes of an earlier daemon are adopted afterwards. Work that waits
//! for the disk goes through [`App::blocking`], off the threads that serve requests.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use forkd_api::{ErrorCode, EventKind};
use forkd_store::{Entry, Lease, Store};
use forkd_types::{Mode, Policy};
use forkd_vmm_link::{Endings, SpawnerError};
use forkd_vmm_proto::Shape;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::error::{Error, chain};
use crate::events::Events;
use crate::launch::{Demand, Dirs, Launcher, NetLauncher};
use crate::limits::{CutSlot, Limits};
use crate::netns::Namespaces;
use crate::ops::images::{self, Operations};
use crate::ops::writing::WritingTags;
use crate::owners::SnapshotOwners;
use crate::private::{passage_dir, private_dir};
use crate::sandbox::{Registry, SandboxHandle};
use crate::state::{Db, SandboxRecord};
use crate::touched::{self, Touched};

/// The state of the daemon that every request shares.
#[derive(Debug)]
pub struct App {
    pub config: Config,
    /// State that survives a restart.
    pub db: Db,
    /// The store of snapshots.
    pub store: Store,
    /// Where VMM processes come from.
    pub launcher: Launcher,
    /// The network engine.
    pub net: NetLauncher,
    /// Where the files of VMs go.
    pub dirs: Dirs,
    pub sandboxes: Registry,
    /// Tags that are being written.
    pub writing: WritingTags,
    /// Pages that children touch first.
    pub touched: Arc<Touched>,
    pub events: Events,
    /// Every limit, and what is reserved under it.
    pub limits: Limits,
    /// Who owns which snapshot.
    pub owners: SnapshotOwners,
    /// Children that may be starting at once.
    pub start_slots: Semaphore,
    /// How many shells recent bursts needed.
    pub demand: Demand,
    /// The daemon is about to stop.
    pub stopping: CancellationToken,
    /// Fetches of images.
    pub operations: Operations,
    /// One at a time for each workspace.
    pub workspace_locks: crate::ops::workspaces::Locks,
    /// Network namespaces of children.
    pub namespaces: Namespaces,
}

/// How long to wait before a process that does not end is killed again.
const KILL_AGAIN: Duration = Duration::from_secs(5);

/// How many children start at once. A start is work of a processor, in the guest as well, so more starts at once than
/// processors only make each of them later.
fn starts_at_once(cpus: usize) -> usize {
    (cpus * 3 / 2).max(1)
}

impl App {
    /// Opens everything. Sandboxes of an earlier daemon are not adopted yet.
    pub fn open(config: Config) -> anyhow::Result<(Arc<Self>, mpsc::UnboundedReceiver<Endings>)> {
        use anyhow::Context;
        let run = config.run_dir.join("vm");
        private_dir(&config.data_dir)?;
        passage_dir(&config.run_dir)?;
        private_dir(&run)?;
        let store = Store::open(&config.data_dir)
            .context("the store cannot be opened")?
            .with_limit(config.store_limit_bytes);
        images::sweep(&store.layout().images(), &store.layout().fetching())
            .context("unfinished images cannot be removed")?;
        let touched = config.data_dir.join("touched");
        let touched = Touched::open(touched.clone())
            .with_context(|| format!("cannot use {}", touched.display()))?;
        if let Some(parent) = config.state_file.parent() {
            std::fs::create_dir_all(parent)
                .with_context(|| format!("cannot create {}", parent.display()))?;
        }
        let db = Db::open(&config.state_file).context("the state cannot be opened")?;
        let dirs = Dirs {
            data: store.layout().sandboxes(),
            run,
        };
        let (endings, receiver) = mpsc::unbounded_channel();
        let launcher = Launcher::new(
            config.spawn_program.clone(),
            config.engine_arguments(),
            config.run_dir.join("spawn.sock"),
            endings,
        );
        let net = NetLauncher::new(config.network.clone(), config.run_dir.join("net.sock"));
        let namespaces = Namespaces::new(config.run_dir.join("netns"));
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let limits = Limits::new(&config);
        let owners = SnapshotOwners::open(&db).context("the owners of snapshots cannot be read")?;
        let app = Arc::new_cyclic(|weak: &Weak<Self>| Self {
            config,
            db,
            store,
            launcher,
            net,
            dirs,
            sandboxes: Registry::default(),
            writing: WritingTags::default(),
            touched: Arc::new(touched),
            events: Events::new({
                let weak = Weak::clone(weak);
                move |kind, object| weak.upgrade()?.owner_of(kind, object)
            }),
            limits,
            owners,
            start_slots: Semaphore::new(starts_at_once(cpus)),
            demand: Demand::default(),
            stopping: CancellationToken::new(),
            operations: Operations::default(),
            workspace_locks: crate::ops::workspaces::Locks::default(),
            namespaces,
        });
        Ok((app, receiver))
    }

    /// Who owns the object of an event; none if it is gone.
    fn owner_of(&self, kind: EventKind, object: &str) -> Option<String> {
        match kind {
            EventKind::SandboxReady
            | EventKind::SandboxFailed
            | EventKind::SandboxDeleted
            | EventKind::SandboxBranched
            | EventKind::SandboxRolledBack
            | EventKind::NetworkDenied
            | EventKind::NetworkReset => {
                let sandbox = self.sandboxes.get(&object.parse().ok()?).ok()?;
                Some(sandbox.owner())
            }
            EventKind::SnapshotReady | EventKind::SnapshotFailed | EventKind::SnapshotDeleted => {
                Some(self.owners.get(&object.parse().ok()?)?.owner)
            }
            // Told with their owner, or without one.
            EventKind::WorkspaceChanged | EventKind::Lagged => None,
        }
    }

    /// Forgets which pages children of deleted snapshots touched.
    pub fn sweep_touched(&self) {
        let keys = self
            .store
            .list()
            .iter()
            .filter_map(|entry| match entry {
                Entry::Whole(manifest) => Some(touched::key(manifest)),
                Entry::Broken { .. } => None,
            })
            .collect();
        if let Err(error) = self.touched.keep_only(&keys) {
            tracing::warn!(%error, "recorded pages of deleted snapshots not removed");
        }
    }

    /// Does something that waits for the disk, off the threads that serve requests.
    pub async fn blocking<T, F>(self: &Arc<Self>, work: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce(&Self) -> Result<T, Error> + Send + 'static,
    {
        let app = Arc::clone(self);
        tokio::task::spawn_blocking(move || work(&app))
            .await
            .map_err(|_| Error::Task)?
    }

    /// Room for a cut. A store above its limit collects first, which waits for the disk.
    pub async fn cut_slot(self: &Arc<Self>) -> Result<CutSlot, Error> {
        if self.store.limit().is_none() {
            return self.limits.cut(&self.store);
        }
        self.blocking(|app| app.limits.cut(&app.store)).await
    }

    /// Refuses when the daemon is about to stop.
    pub fn check_open(&self) -> Result<(), Error> {
        if self.stopping.is_cancelled() {
            return Err(Error::hinted(
                ErrorCode::ShuttingDown,
                "the daemon is about to stop",
                "try again when it is back",
            ));
        }
        Ok(())
    }

    /// Refuses if the network engine is not installed.
    pub fn need_network(&self) -> Result<(), Error> {
        if self.net.is_installed() {
            return Ok(());
        }
        Err(Error::hinted(
            ErrorCode::NetworkUnavailable,
            "this host has no network engine, so sandboxes have no network",
            "install forkd-net beside forkd-controller, or use the network mode none",
        ))
    }

    /// Refuses a policy that this host cannot serve.
    pub fn check_network(&self, policy: &Policy) -> Result<(), Error> {
        match policy.mode() {
            Mode::None => Ok(()),
            Mode::Public | Mode::Open | Mode::Custom => self.need_network(),
        }
    }

    /// The policy of a sandbox whose request names none. A host without the engine has the mode `none` only.
    pub fn default_network(&self) -> Policy {
        match self.net.is_installed() {
            true => self.config.network.default.clone(),
            false => Policy::none(),
        }
    }

    /// Stores a change that has already happened to a sandbox, and returns whether that succeeded. A
    /// failure cannot be reported to a client, so it goes to the log.
    pub async fn write_down(&self, record: SandboxRecord) -> bool {
        let id = record.id.clone();
        let written = self.db.put_sandboxes(vec![record]).await;
        if let Err(error) = &written {
            tracing::error!(sandbox = %id, error = chain(error), "not written down");
        }
        written.is_ok()
    }

    /// Ends a VM's process for certain and removes everything of the sandbox. Nothing is removed, and the sandbox is not
    /// reported as deleted, while its process is known to live.
    pub async fn forget(self: &Arc<Self>, sandbox: &Arc<SandboxHandle>, lease: Lease) {
        let id = sandbox.id.clone();
        while let Err(error) = self.launcher.kill(&id).await {
            tracing::error!(sandbox = %id, error = chain(&error), "the VMM process could not be ended");
            if !matches!(error, SpawnerError::StillThere { .. }) {
                break;
            }
            tokio::time::sleep(KILL_AGAIN).await;
        }
        if let Err(error) = self.db.delete_sandboxes(vec![id.clone()]).await {
            tracing::error!(sandbox = %id, error = chain(&error), "not written down");
        }
        drop(lease);
        if let Some(name) = sandbox.record().netns {
            self.namespaces.remove(&name).await;
        }
        let cleanup = {
            let id = id.clone();
            self.blocking(move |app| {
                app.dirs.remove(&id);
                // Blobs that came free go with the next periodic collection.
                Ok(())
            })
        };
        if let Err(error) = cleanup.await {
            tracing::warn!(sandbox = %id, error = error.chain(), "clean-up");
        }
        self.sandboxes.remove(&id);
        self.events
            .tell_of(Some(sandbox.owner()), EventKind::SandboxDeleted, &id, None);
        sandbox.gone.cancel();
    }

    /// Removes content that came free since the last time.
    pub async fn collect(self: &Arc<Self>) -> Result<(), Error> {
        self.blocking(|app| {
            let freed = app.store.collect_freed();
            freed.map_err(Error::store("unused content was not removed"))
        })
        .await?;
        self.drop_volatile().await
    }

    /// Drops volatile content that nothing uses, here and with `forkd-spawn`.
    pub async fn drop_volatile(&self) -> Result<(), Error> {
        let gone = self.store.drop_unheld_volatile();
        Ok(self.launcher.release(gone).await?)
    }

    /// Keeps shells of the shape that was used last, in place of those of another. Recent bursts decide how many.
    pub async fn keep_ready(&self, shape: Shape) -> Result<(), SpawnerError> {
        if self.config.pool == 0 {
            return Ok(());
        }
        let depth = self.demand.depth(self.config.pool, Instant::now());
        self.launcher.keep_ready(shape, depth).await
    }
}
