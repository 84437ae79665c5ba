//! The connection to `forkd-net`, the network engine.
//!
//! [`NetLauncher`] starts the program if it does not run, gives it the settings of the operator, and connects again after
//! a failure. The engine survives the daemon. A host without the program runs sandboxes with the mode `none` only.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forkd_api::{Isolation, MissingWall};
use forkd_net_proto::{NetCounters, NetError, NetStats, OpenFlow};
use forkd_types::{Policy, Rule, SandboxId};
use forkd_vmm_link::{LinkError, LogPage, NetEngine, NetEngineError, NetNews, end_net_engine};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::program::{self, NotStarted};
use crate::config::NetworkConfig;

/// The network engine of this host.
#[derive(Debug)]
pub struct NetLauncher {
    config: NetworkConfig,
    socket: PathBuf,
    current: Mutex<Option<Arc<NetEngine>>>,
    /// One connects at a time. True once the engine was ended for good.
    connecting: tokio::sync::Mutex<bool>,
    /// Each new connection's stream of reports goes here.
    connections: mpsc::UnboundedSender<NetNews>,
    receiver: Mutex<Option<mpsc::UnboundedReceiver<NetNews>>>,
    counted: Mutex<Counted>,
}

/// Counters over all engines since the daemon started.
#[derive(Debug, Default)]
struct Counted {
    /// Sums of engines that ended.
    past: NetCounters,
    /// The last answer of the engine that runs.
    last: NetCounters,
}

impl NetLauncher {
    /// Does not connect yet.
    pub fn new(config: NetworkConfig, socket: PathBuf) -> Self {
        let (connections, receiver) = mpsc::unbounded_channel();
        Self {
            config,
            socket,
            current: Mutex::new(None),
            connecting: tokio::sync::Mutex::new(false),
            connections,
            receiver: Mutex::new(Some(receiver)),
            counted: Mutex::default(),
        }
    }

    /// The program is there.
    pub fn is_installed(&self) -> bool {
        self.config.program.is_file()
    }

    pub fn program(&self) -> &Path {
        &self.config.program
    }

    /// The rules of the operator.
    pub fn floor(&self) -> &[Rule] {
        &self.config.floor
    }

    /// Streams of reports, one for each connection. The first caller gets them.
    pub fn connections(&self) -> Option<mpsc::UnboundedReceiver<NetNews>> {
        self.receiver.lock().take()
    }

    /// Serves a sandbox through a frame socket.
    pub async fn attach(
        &self,
        id: &SandboxId,
        policy: Policy,
        generation: u64,
        frames: &OwnedFd,
    ) -> Result<(), NetEngineError> {
        let engine = self.connected().await?;
        self.noted(&engine, engine.attach(id, policy, generation, frames).await)
    }

    /// Puts a policy in force; false if the engine does not serve the sandbox.
    pub async fn set_policy(
        &self,
        id: &SandboxId,
        policy: Policy,
        generation: u64,
    ) -> Result<bool, NetEngineError> {
        let engine = self.connected().await?;
        match self.noted(&engine, engine.set_policy(id, policy, generation).await) {
            Ok(()) => Ok(true),
            Err(NetEngineError::Refused(NetError::Unknown { .. })) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Ends every connection of a sandbox. A sandbox that the engine does not serve has none.
    pub async fn reset(&self, id: &SandboxId) -> Result<(), NetEngineError> {
        let engine = self.connected().await?;
        match self.noted(&engine, engine.reset(id).await) {
            Err(NetEngineError::Refused(NetError::Unknown { .. })) => Ok(()),
            other => other,
        }
    }

    /// The state of one sandbox; `None` if the engine does not serve it.
    pub async fn stats(&self, id: &SandboxId) -> Result<Option<NetStats>, NetEngineError> {
        let engine = self.connected().await?;
        self.noted(&engine, engine.stats(id).await)
    }

    /// Open flows of a sandbox.
    pub async fn flows(&self, id: &SandboxId) -> Result<Vec<OpenFlow>, NetEngineError> {
        let engine = self.connected().await?;
        self.noted(&engine, engine.flows(id).await)
    }

    /// Entries of the flow log after a number.
    pub async fn log(&self, id: &SandboxId, after: u64) -> Result<LogPage, NetEngineError> {
        let engine = self.connected().await?;
        self.noted(&engine, engine.log(id, after).await)
    }

    /// Ends the networks of sandboxes that `is_known` does not know.
    pub async fn detach_unknown(
        &self,
        is_known: impl Fn(&SandboxId) -> bool,
    ) -> Result<(), NetEngineError> {
        let engine = self.connected().await?;
        for id in self.noted(&engine, engine.list().await)? {
            if !is_known(&id) {
                tracing::info!(sandbox = %id, "network of no sandbox ended");
                self.noted(&engine, engine.detach(&id).await)?;
            }
        }
        Ok(())
    }

    /// Counters since the daemon started and the number of sandboxes, without starting the engine.
    pub async fn totals(&self) -> Result<(NetCounters, u32), NetEngineError> {
        let engine = self.running().await?;
        let (now, sandboxes) = self.noted(&engine, engine.totals().await)?;
        let mut counted = self.counted.lock();
        // Another engine counts from zero.
        if now.frames_up < counted.last.frames_up || now.dns < counted.last.dns {
            let ended = counted.last;
            counted.past.add(&ended);
        }
        counted.last = now;
        let mut sum = counted.past;
        sum.add(&now);
        Ok((sum, sandboxes))
    }

    /// The name servers of the guests, without starting the engine.
    pub async fn resolvers(&self) -> Result<Vec<IpAddr>, NetEngineError> {
        let engine = self.running().await?;
        Ok(match self.config.resolvers.as_slice() {
            [] => engine.resolvers().to_vec(),
            given => given.iter().map(SocketAddr::ip).collect(),
        })
    }

    /// The walls around the engine, which is not started for this. The filter of system calls and the lack of capabilities
    /// are among them.
    pub async fn isolation(&self) -> Result<Isolation, NetEngineError> {
        let engine = self.running().await?;
        let walls = engine.walls();
        let missing = walls.missing.iter().map(|missing| MissingWall {
            wall: missing.wall.name().to_owned(),
            reason: Some(missing.reason.clone()),
        });
        Ok(Isolation {
            walls: walls
                .standing
                .iter()
                .map(|wall| wall.name().to_owned())
                .collect(),
            missing: missing.collect(),
        })
    }

    /// Ends the engine and every connection of every sandbox. No other is started, whether one ran or not.
    pub async fn end(&self) -> std::io::Result<()> {
        let mut ended = self.connecting.lock().await;
        *ended = true;
        self.disconnected();
        self.end_process().await
    }

    async fn end_process(&self) -> std::io::Result<()> {
        let path = self.socket.clone();
        tokio::task::spawn_blocking(move || end_net_engine(&path))
            .await
            .map_err(std::io::Error::other)?
    }

    /// Forgets the connection, so that the next use makes a new one.
    pub fn disconnected(&self) {
        self.current.lock().take();
    }

    /// A connection that failed is not used again. Another one may be in its place by now.
    fn noted<T>(
        &self,
        engine: &Arc<NetEngine>,
        result: Result<T, NetEngineError>,
    ) -> Result<T, NetEngineError> {
        if matches!(
            result,
            Err(NetEngineError::Link(_) | NetEngineError::Late { .. })
        ) {
            let mut current = self.current.lock();
            current.take_if(|current| Arc::ptr_eq(current, engine));
        }
        result
    }

    async fn running(&self) -> Result<Arc<NetEngine>, NetEngineError> {
        let current = self.current.lock().clone();
        match current {
            Some(engine) => Ok(engine),
            None => Ok(Arc::new(NetEngine::connect(&self.socket).await?.0)),
        }
    }

    /// A connection to the engine, which is started if it does not run.
    pub async fn connected(&self) -> Result<Arc<NetEngine>, NetEngineError> {
        let current = self.current.lock().clone();
        if let Some(engine) = current {
            return Ok(engine);
        }
        let ended = self.connecting.lock().await;
        if *ended {
            return Err(LinkError::Closed.into());
        }
        let current = self.current.lock().clone();
        if let Some(engine) = current {
            return Ok(engine);
        }
        let (engine, news) = match NetEngine::connect(&self.socket).await {
            Ok(connected) => connected,
            Err(NetEngineError::Refused(NetError::Version { ours, theirs })) => {
                tracing::warn!(
                    found = ours,
                    wanted = theirs,
                    "forkd-net is of another version; it ends, with the connections of all sandboxes"
                );
                self.replace().await?
            }
            Err(NetEngineError::Late { after }) => {
                // It serves no guest, either, and a second engine cannot listen beside it.
                tracing::error!(?after, "forkd-net does not answer; it ends");
                self.replace().await?
            }
            Err(_) => self.start().await?,
        };
        // Before the first sandbox is attached: the rules of the operator hold from its first packet on.
        let (floor, resolvers) = (self.config.floor.clone(), self.config.resolvers.clone());
        engine.configure(floor, resolvers).await?;
        let engine = Arc::new(engine);
        *self.current.lock() = Some(Arc::clone(&engine));
        // The receiver may be gone when the daemon stops.
        let _ = self.connections.send(news);
        Ok(engine)
    }

    /// Ends the engine that listens and starts another.
    async fn replace(&self) -> Result<(NetEngine, NetNews), NetEngineError> {
        let failed = |source| self.failed(source);
        self.end_process().await.map_err(failed)?;
        self.start().await
    }

    async fn start(&self) -> Result<(NetEngine, NetNews), NetEngineError> {
        program::start(
            &self.config.program,
            &self.socket,
            &[],
            async |socket: &Path| NetEngine::connect(socket).await,
            |error| matches!(error, NetEngineError::Late { .. }),
        )
        .await
        .map_err(|error| match error {
            NotStarted::Io(source) => self.failed(source),
            NotStarted::Connect(error) => error,
        })
    }

    fn failed(&self, source: std::io::Error) -> NetEngineError {
        NetEngineError::Connect {
            path: self.config.program.clone(),
            source,
        }
    }
}
