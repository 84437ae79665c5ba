//! The daemon as one value that every request sees.

use std::sync::{Arc, Weak};

use forkd_api::{ErrorCode, EventKind};
use forkd_store::{Entry, Lease, Store};
use forkd_vmm_link::Endings;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use crate::audit::Audit;
use crate::auth::Auth;
use crate::config::Config;
use crate::db::{Db, SandboxRecord};
use crate::error::{Error, chain};
use crate::events::Events;
use crate::launch::{Cgroups, Dirs, Launcher};
use crate::owners::SnapshotOwners;
use crate::private::{passage_dir, private_dir};
use crate::sandbox::{Registry, Sandbox};
use crate::tokens::Tokens;
use crate::touched::Touched;
use crate::writing::WritingTags;

/// The daemon.
#[derive(Debug)]
pub struct App {
    /// What it was told.
    pub config: Config,
    /// State that survives a restart.
    pub db: Db,
    /// Snapshots.
    pub store: Store,
    /// Where VMM processes come from.
    pub launcher: Launcher,
    /// Where the files of VMs go.
    pub dirs: Dirs,
    /// Limits on single VMs.
    pub cgroups: Cgroups,
    /// Live sandboxes.
    pub sandboxes: Registry,
    /// Tags that are being written.
    pub writing: WritingTags,
    /// Pages that children touch first.
    pub touched: Touched,
    /// What happened.
    pub events: Events,
    /// Known tokens.
    pub auth: Arc<Auth>,
    /// Tokens that were made through the API.
    pub tokens: Tokens,
    /// Who owns which snapshot.
    pub owners: SnapshotOwners,
    /// The audit log.
    pub audit: Arc<Audit>,
    /// Branches that may be under way at once.
    pub branch_slots: Arc<Semaphore>,
    /// Children that may be starting at once.
    pub start_slots: Semaphore,
    /// The daemon is about to stop.
    pub stopping: CancellationToken,
    /// One at a time for each workspace.
    pub workspace_locks: crate::workspaces::Locks,
}

/// A child that starts waits for its guest most of the time.
const STARTS_PER_CPU: usize = 4;

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
        let touched = config.data_dir.join("touched");
        let touched = Touched::open(touched.clone())
            .with_context(|| format!("cannot use {}", touched.display()))?;
        if let Some(parent) = config.state_file.parent() {
            std::fs::create_dir_all(parent)
                .with_context(|| format!("cannot create {}", parent.display()))?;
        }
        let db = Db::open(&config.state_file).context("the state cannot be opened")?;
        let auth = Arc::new(Auth::load(config.token_file.as_deref())?);
        let tokens = Tokens::open(&db, &auth).context("the tokens cannot be read")?;
        let owners = SnapshotOwners::open(&db).context("the owners of snapshots cannot be read")?;
        let audit = Arc::new(Audit::open(
            config.audit_log.as_deref(),
            config.audit_limits,
        )?);
        let dirs = Dirs {
            data: store.layout().sandboxes(),
            run,
        };
        let (endings, receiver) = mpsc::unbounded_channel();
        let launcher = Launcher::new(
            config.spawn_program.clone(),
            config.run_dir.join("spawn.sock"),
            endings,
        );
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let branch_slots = Arc::new(Semaphore::new(config.branch_concurrency));
        let app = Arc::new_cyclic(|weak: &Weak<Self>| Self {
            config,
            db,
            store,
            launcher,
            dirs,
            cgroups: Cgroups::default(),
            sandboxes: Registry::default(),
            writing: WritingTags::default(),
            touched,
            events: Events::new({
                let weak = Weak::clone(weak);
                move |kind, object| weak.upgrade()?.owner_of(kind, object)
            }),
            auth,
            tokens,
            owners,
            audit,
            branch_slots,
            start_slots: Semaphore::new(STARTS_PER_CPU * cpus),
            stopping: CancellationToken::new(),
            workspace_locks: crate::workspaces::Locks::default(),
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
            | EventKind::SandboxRolledBack => {
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
        let states = self
            .store
            .list()
            .iter()
            .filter_map(|entry| match entry {
                Entry::Whole(manifest) => Some(manifest.state.digest),
                Entry::Broken { .. } => None,
            })
            .collect();
        if let Err(error) = self.touched.keep_only(&states) {
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

    /// Writes down what has happened to a sandbox already, and says whether that worked: nobody can be told of a
    /// failure, so the log is.
    pub async fn write_down(&self, record: SandboxRecord) -> bool {
        let id = record.id.clone();
        let written = self.db.put_sandboxes(vec![record]).await;
        if let Err(error) = &written {
            tracing::error!(sandbox = %id, error = chain(error), "not written down");
        }
        written.is_ok()
    }

    /// Ends a VM's process for certain and removes everything of the sandbox.
    pub async fn forget(self: &Arc<Self>, sandbox: &Arc<Sandbox>, lease: Lease) {
        let id = sandbox.id.clone();
        if let Err(error) = self.launcher.kill(&id).await {
            tracing::error!(sandbox = %id, error = chain(&error), "the VMM process could not be ended");
        }
        if let Err(error) = self.db.delete_sandboxes(vec![id.clone()]).await {
            tracing::error!(sandbox = %id, error = chain(&error), "not written down");
        }
        drop(lease);
        let cleanup = {
            let id = id.clone();
            self.blocking(move |app| {
                app.dirs.remove(&id);
                app.cgroups.remove(&id);
                app.store
                    .collect()
                    .map(drop)
                    .map_err(Error::store("unused content could not be removed"))
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
}
