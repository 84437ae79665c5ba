//! The daemon's life: open, adopt, serve, stop.

use std::sync::{Arc, RwLock};
use std::time::Duration;

use anyhow::Context;
use forkd_vmm_link::Endings;
use forkd_vmm_proto::Shape;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::Interval;

use crate::activation;
use crate::app::App;
use crate::clock;
use crate::config::Config;
use crate::error::{Error, chain};
use crate::listen::{self, Bound, Server, Tls};
use crate::sandbox::adopt::adopt;
use crate::workspaces;

/// How long an answered idempotency key is remembered, in seconds.
const KEEP_KEYS: u64 = 24 * 3600;
/// How often expired idempotency keys are removed.
const SWEEP: Duration = Duration::from_secs(600);
/// How often content that no sandbox uses any more is removed.
const COLLECT: Duration = Duration::from_secs(5);

/// How often counts of refused requests are written to the audit log.
const AUDIT_SWEEP: Duration = Duration::from_secs(15);
/// Sweeps after which the head of the audit log goes to the daemon's own log: an hour.
const SWEEPS_PER_ANCHOR: u32 = 240;

/// Runs the daemon until it is told to stop.
pub async fn run(config: Config) -> anyhow::Result<()> {
    crate::metrics::install();
    let descriptors = raise_file_limit();
    // Before anything that takes time: an early signal must not end the daemon half-way.
    let signals = Signals::new()?;
    let drain = config.drain;
    let addresses = config.listen.clone();
    let tls: Option<Tls> = match &config.tls {
        Some(files) => Some(Arc::new(RwLock::new(listen::load_tls(files)?))),
        None => None,
    };
    // The addresses first: a daemon that cannot be reached must not touch the state of another.
    let mut bound = activation::sockets(config.token_file.is_some())?;
    for address in &addresses {
        bound.push(listen::bind(address).await?);
    }
    let (app, endings) = App::open(config)?;
    tokio::spawn(watch_endings(Arc::clone(&app), endings));
    let found = adopt(&app)
        .await
        .context("the sandboxes of an earlier daemon cannot be taken over")?;
    tracing::info!(
        adopted = found.adopted,
        vanished = found.vanished,
        ended = found.ended,
        "state taken over"
    );
    workspaces::end_suspended(&app).await?;
    app.sweep_touched();
    app.owners
        .keep_only(|tag| app.store.contains(tag))
        .await
        .context("the owners of snapshots cannot be read")?;
    app.db
        .expire_keys(clock::unix().saturating_sub(KEEP_KEYS), true)
        .await?;
    let tcp_listeners = bound
        .iter()
        .filter(|bound| matches!(bound, Bound::Tcp(_)))
        .count();
    let server = Server::new(
        crate::http::router(Arc::clone(&app)),
        tls.clone(),
        app.config.connections.within(descriptors, tcp_listeners),
        app.stopping.clone(),
    );
    let accepting: Vec<_> = bound
        .into_iter()
        .map(|bound| tokio::spawn(server.clone().accept(bound)))
        .collect();
    tracing::info!(?addresses, version = env!("CARGO_PKG_VERSION"), "listening");
    // It fails without systemd.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    tokio::spawn(crate::metrics::keep_drained(app.stopping.clone()));
    tokio::spawn(keep_house(Arc::clone(&app)));
    tokio::spawn(collect(Arc::clone(&app)));
    tokio::spawn(activation::keep_watchdog_quiet(
        crate::http::health(&app),
        app.stopping.clone(),
    ));
    tokio::spawn(keep_audit(Arc::clone(&app)));
    signals.until_told(&app, tls.as_ref()).await;
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    app.stopping.cancel();
    for task in accepting {
        let _ = task.await;
    }
    if tokio::time::timeout(drain, server.drained()).await.is_err() {
        tracing::warn!("requests were still under way");
    }
    anchor(&app);
    let sandboxes = app.sandboxes.len();
    if sandboxes > 0 {
        tracing::info!(sandboxes, "stopped; sandboxes go on");
    } else {
        // Shells that nobody has used are all that is left.
        let ended = app.launcher.end().await;
        tracing::info!(spawner_ended = ended.is_ok(), "stopped");
    }
    Ok(())
}

/// Raises the soft limit on open files to the hard one and returns the limit. Every sandbox and every connection takes a few
/// descriptors; the usual 1,024 is far below what a host can run.
fn raise_file_limit() -> u64 {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit on open files stays as it is");
    }
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// The signals of the daemon, caught from when this was made.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for SIGTERM or SIGINT; reads files again on SIGHUP.
    async fn until_told(mut self, app: &Arc<App>, tls: Option<&Tls>) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hangup.recv() => reload(app, tls),
            }
        }
    }
}

fn reload(app: &App, tls: Option<&Tls>) {
    if let Err(error) = app.auth.reload() {
        tracing::error!(error = format!("{error:#}"), "the tokens stay as they are");
    }
    if let Err(error) = app.audit.reopen() {
        tracing::error!(%error, "the audit log stays as it is");
    }
    if let (Some(tls), Some(files)) = (tls, &app.config.tls) {
        match listen::load_tls(files) {
            Ok(config) => {
                *tls.write()
                    .unwrap_or_else(std::sync::PoisonError::into_inner) = config
            }
            Err(error) => {
                tracing::error!(
                    error = format!("{error:#}"),
                    "the certificate stays as it is"
                );
            }
        }
    }
    tracing::info!("files read again");
}

/// Notes the ends of VMs. A sandbox's owner sees the end of its own VM; this only keeps the connection to
/// `forkd-spawn` alive and says when that one is gone.
async fn watch_endings(app: Arc<App>, mut connections: mpsc::UnboundedReceiver<Endings>) {
    while let Some(mut endings) = connections.recv().await {
        while let Some(ended) = endings.next().await {
            tracing::debug!(sandbox = %ended.id, pid = ended.pid, how = ?ended.how, "a VMM ended");
        }
        app.launcher.disconnected();
        if !app.stopping.is_cancelled() {
            tracing::error!("forkd-spawn is gone");
            // No request has to wait for the next one, and no check of the health starts it.
            if let Err(error) = app.launcher.status().await {
                tracing::error!(error = chain(&error), "forkd-spawn cannot be started");
            }
        }
    }
}

/// Waits for the time to come round; false when the daemon stops.
async fn next(app: &App, ticks: &mut Interval) -> bool {
    tokio::select! {
        _ = ticks.tick() => true,
        () = app.stopping.cancelled() => false,
    }
}

/// Removes expired idempotency keys until the daemon stops.
async fn keep_house(app: Arc<App>) {
    let mut ticks = tokio::time::interval(SWEEP);
    while next(&app, &mut ticks).await {
        let before = clock::unix().saturating_sub(KEEP_KEYS);
        if let Err(error) = app.db.expire_keys(before, false).await {
            tracing::warn!(error = chain(&error), "old keys stay");
        }
    }
}

/// Writes counts of refused requests to the audit log when they are due, and its head to the daemon's own log.
async fn keep_audit(app: Arc<App>) {
    let mut ticks = tokio::time::interval(AUDIT_SWEEP);
    let mut since = 0;
    while next(&app, &mut ticks).await {
        app.audit.sweep();
        since += 1;
        if since >= SWEEPS_PER_ANCHOR {
            anchor(&app);
            since = 0;
        }
    }
}

fn anchor(app: &App) {
    if let Some(head) = app.audit.head() {
        tracing::info!(head, "the audit log ends with the line of this digest");
    }
}

/// Removes content that ended sandboxes were the last to use.
async fn collect(app: Arc<App>) {
    let mut ticks = tokio::time::interval(COLLECT);
    while next(&app, &mut ticks).await {
        let collected = app.blocking(|app| {
            app.store
                .collect_freed()
                .map_err(Error::store("unused content was not removed"))
        });
        if let Err(error) = collected.await {
            tracing::warn!(error = error.chain(), "it stays until the next time");
        }
    }
}

impl App {
    /// Asks for shells of the shape that was just used, in place of those of another; the answer is not waited for.
    pub fn refill(self: &Arc<Self>, shape: Shape) {
        if self.config.pool == 0 {
            return;
        }
        let app = Arc::clone(self);
        tokio::spawn(async move {
            if let Err(error) = app.launcher.keep_ready(shape, app.config.pool).await {
                tracing::debug!(error = chain(&error), "the pool was not set");
            }
        });
    }
}
