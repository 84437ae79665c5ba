//! The daemon's life: open, adopt, serve, stop.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use forkd_vmm_link::Endings;
use parking_lot::RwLock;
use rustix::process::{Resource, getrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::Interval;
use tokio_util::sync::CancellationToken;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use forkd_api::routes;
use forkd_edge::activation;
use forkd_edge::config::{EdgeConfig, TlsFiles};
use forkd_edge::gate::Gate;
use forkd_edge::listen::{self, Bound, Limits, Server, Tls};
use forkd_edge::metrics;
use forkd_edge::tokens::Tokens;
use forkd_fleet::etcd::{Etcd, EtcdError};
use forkd_mcp::Selection;
use forkd_planes::e2b::{self, E2bConfig};
use forkd_planes::ports::{self, PortNames, Ports};
use forkd_sandboxes::app::App;
use forkd_sandboxes::clock;
use forkd_sandboxes::error::chain;
use forkd_sandboxes::health;
use forkd_sandboxes::ops::{network, secrets, workspaces};
use forkd_sandboxes::sandbox::adopt::adopt;

use crate::args::Settings;
use crate::mcp;
use crate::netns;

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

/// The planes behind the gate.
pub struct Front {
    /// The gate before every route.
    pub gate: Gate,
    /// The tokens that were made through the API.
    pub tokens: Arc<Tokens>,
    /// Serves every route.
    pub router: Router,
    ports: Arc<Ports>,
}

impl Front {
    /// Reads the tokens and puts the gate before the REST plane.
    pub fn open(app: &Arc<App>, edge: &EdgeConfig) -> anyhow::Result<Self> {
        Self::with_e2b(app, edge, None, PortNames::default())
    }

    /// The same with the E2B plane, if it is set up, and with host names of ports.
    pub fn with_e2b(
        app: &Arc<App>,
        edge: &EdgeConfig,
        e2b: Option<E2bConfig>,
        names: PortNames,
    ) -> anyhow::Result<Self> {
        let gate = Gate::open(edge)?;
        let tokens = Tokens::open(&app.db, &gate.auth).context("the tokens cannot be read")?;
        let tokens = Arc::new(tokens);
        let ports = Ports::open(app, names, &gate)?;
        let plane =
            forkd_planes::rest::router(Arc::clone(app), Arc::clone(&tokens), Arc::clone(&ports));
        let rest = ports::front(&ports, gate.guard(plane));
        let router = match e2b {
            Some(config) => e2b::front(app, config, &gate, &ports, rest),
            None => rest,
        };
        Ok(Self {
            router,
            gate,
            tokens,
            ports,
        })
    }

    /// Serves tools for models on `/mcp`, too.
    pub fn with_mcp(
        mut self,
        tools: Selection,
        stopping: CancellationToken,
    ) -> anyhow::Result<Self> {
        let plane = mcp::router(self.router.clone(), tools, stopping)?;
        let (plane, others) = (self.gate.guard(plane), self.router);
        let ports = Arc::clone(&self.ports);
        let service = tower::service_fn(move |request: Request<Body>| {
            use tower::ServiceExt;
            // A server in a guest may have such a path, too.
            let is_tools = request.uri().path() == routes::MCP && !ports.names(&request);
            let router = if is_tools { &plane } else { &others };
            router.clone().oneshot(request)
        });
        self.router = Router::new().fallback_service(service);
        Ok(self)
    }
}

/// Refuses a host on which a wall around sandboxes does not stand.
async fn check_jail(app: &App) -> anyhow::Result<()> {
    let mut missing = app.launcher.isolation().await?.missing;
    if app.net.is_installed() {
        app.net.connected().await?;
        missing.extend(app.net.isolation().await?.missing);
    }
    let missing: Vec<String> = missing
        .into_iter()
        .map(|missing| format!("{} ({})", missing.wall, missing.reason.unwrap_or_default()))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    bail!(
        "--require-jail is set, and these walls do not stand: {}",
        missing.join(", ")
    )
}

/// The limits on connections, within the descriptors that the process has.
fn connection_limits(edge: &EdgeConfig, bound: &[Bound]) -> Limits {
    let is_tcp = |bound: &&Bound| matches!(bound, Bound::Tcp(_));
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let listeners = bound.iter().filter(is_tcp).count();
    edge.connections.within(descriptors, listeners)
}

/// Runs the daemon until it is told to stop.
pub async fn run(settings: Settings) -> anyhow::Result<()> {
    metrics::install();
    if let Err(error) = forkd_os::raise_file_limit() {
        tracing::warn!(%error, "the limit on open files stays as it is");
    }
    // Before anything that takes time: a signal that comes early must not end the daemon half-way.
    let signals = Signals::new()?;
    let Settings {
        edge,
        sandboxes,
        drain,
        require_jail,
        fleet,
        mcp,
        e2b,
        ports,
    } = settings;
    let fleet = fleet
        .map(|fleet| Ok::<_, EtcdError>((Etcd::new(&fleet.etcd)?, fleet)))
        .transpose()?;
    let tls: Option<Tls> = match &edge.tls {
        Some(files) => Some(Arc::new(RwLock::new(listen::load_tls(files)?))),
        None => None,
    };
    // The addresses first: a daemon that cannot be reached must not touch the state of another.
    let mut bound = activation::sockets(edge.token_file.is_some())?;
    for address in &edge.listen {
        bound.push(listen::bind(address).await?);
    }
    let (app, endings) = App::open(sandboxes)?;
    let mut front = Front::with_e2b(&app, &edge, e2b, ports)?;
    if let Some(tools) = mcp {
        front = front.with_mcp(tools, app.stopping.clone())?;
    }
    let Front { gate, router, .. } = front;
    app.namespaces
        .set_line_server(netns::line_server(router.clone())?);
    tokio::spawn(watch_endings(Arc::clone(&app), endings));
    let found = adopt(&app)
        .await
        .context("the sandboxes of an earlier daemon cannot be taken over")?;
    if require_jail && let Err(error) = check_jail(&app).await {
        end_programs(&app).await;
        return Err(error);
    }
    tokio::spawn(network::keep(Arc::clone(&app)));
    tokio::spawn(secrets::keep(Arc::clone(&app)));
    tracing::info!(
        adopted = found.adopted,
        vanished = found.vanished,
        ended = found.ended,
        "state taken over"
    );
    workspaces::end_suspended(&app).await?;
    forkd_builds::end_orphans(&app);
    app.sweep_touched();
    app.owners
        .keep_only(|tag| app.store.contains(tag))
        .await
        .context("the owners of snapshots cannot be read")?;
    app.db
        .expire_keys(clock::unix().saturating_sub(KEEP_KEYS), true)
        .await?;
    let limits = connection_limits(&edge, &bound);
    let server = Server::new(router, tls.clone(), limits, app.stopping.clone());
    let accepting: Vec<_> = bound
        .into_iter()
        .map(|bound| tokio::spawn(server.clone().accept(bound)))
        .collect();
    tracing::info!(addresses = ?edge.listen, version = env!("CARGO_PKG_VERSION"), "listening");
    // It fails without systemd.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    if let Some((etcd, fleet)) = fleet {
        let joined = async move { etcd.keep_joined(&fleet.name, &fleet.url).await };
        tokio::spawn(app.stopping.clone().run_until_cancelled_owned(joined));
    }
    tokio::spawn(metrics::keep_drained(app.stopping.clone()));
    tokio::spawn(keep_house(Arc::clone(&app)));
    tokio::spawn(collect(Arc::clone(&app)));
    tokio::spawn(activation::keep_watchdog_quiet(
        health::of_daemon(&app),
        app.stopping.clone(),
    ));
    tokio::spawn(keep_audit(Arc::clone(&app), gate.clone()));
    signals
        .until_told(&gate, tls.as_ref().zip(edge.tls.as_ref()))
        .await;
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    app.stopping.cancel();
    for task in accepting {
        let _ = task.await;
    }
    if tokio::time::timeout(drain, server.drained()).await.is_err() {
        tracing::warn!("requests were still under way");
    }
    anchor(&gate);
    end_programs(&app).await;
    Ok(())
}

/// Ends `forkd-spawn`, `forkd-net` and `forkd-broker`, unless a sandbox needs them.
async fn end_programs(app: &App) {
    let sandboxes = app.sandboxes.len();
    if sandboxes > 0 {
        tracing::info!(sandboxes, "stopped; sandboxes go on");
        return;
    }
    // Only unused shells are left.
    let spawner = app.launcher.end().await;
    let engine = app.net.end().await;
    let broker = app.broker.end().await;
    tracing::info!(
        spawner_ended = spawner.is_ok(),
        engine_ended = engine.is_ok(),
        broker_ended = broker.is_ok(),
        "stopped"
    );
}

/// Signals to the daemon that arrived since this value was created.
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

    /// Waits for one to stop; reads files again on SIGHUP.
    async fn until_told(mut self, gate: &Gate, tls: Option<(&Tls, &TlsFiles)>) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hangup.recv() => reload(gate, tls),
            }
        }
    }
}

fn reload(gate: &Gate, tls: Option<(&Tls, &TlsFiles)>) {
    if let Err(error) = gate.auth.reload() {
        tracing::error!(error = format!("{error:#}"), "the tokens stay as they are");
    }
    if let Err(error) = gate.audit.reopen() {
        tracing::error!(%error, "the audit log stays as it is");
    }
    if let Some((tls, files)) = tls {
        match listen::load_tls(files) {
            Ok(config) => *tls.write() = config,
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

/// Deletes expired idempotency keys at intervals.
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
async fn keep_audit(app: Arc<App>, gate: Gate) {
    let mut ticks = tokio::time::interval(AUDIT_SWEEP);
    let mut since = 0;
    while next(&app, &mut ticks).await {
        gate.audit.sweep();
        since += 1;
        if since >= SWEEPS_PER_ANCHOR {
            anchor(&gate);
            since = 0;
        }
    }
}

fn anchor(gate: &Gate) {
    if let Some(head) = gate.audit.head() {
        tracing::info!(head, "the audit log ends with the line of this digest");
    }
}

/// Collects content that no snapshot and no sandbox needs any more.
async fn collect(app: Arc<App>) {
    let mut ticks = tokio::time::interval(COLLECT);
    while next(&app, &mut ticks).await {
        if let Err(error) = app.collect().await {
            tracing::warn!(error = error.chain(), "it stays until the next time");
        }
    }
}
