//! The connection to `forkd-broker`, the broker of secrets.
//!
//! [`BrokerLauncher`] starts the program when the first sandbox needs a secret, gives it the certificate authority of the
//! host, and connects again after a failure. The broker survives the daemon. A host without the program refuses policies
//! with injections.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forkd_net_proto::broker::{Authority, BrokerError};
use forkd_vmm_link::{Broker, BrokerCallError, BrokerNews, LinkError, broker_pair, end_broker};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::net::NetLauncher;
use super::program::{self, NotStarted};
use crate::config::BrokerConfig;
use crate::error::Error;

/// The broker of this host.
#[derive(Debug)]
pub struct BrokerLauncher {
    config: BrokerConfig,
    socket: PathBuf,
    current: Mutex<Option<Arc<Broker>>>,
    /// One connects at a time. True once the broker was ended for good.
    connecting: tokio::sync::Mutex<bool>,
    /// Each new connection's stream of reports goes here.
    connections: mpsc::UnboundedSender<BrokerNews>,
    receiver: Mutex<Option<mpsc::UnboundedReceiver<BrokerNews>>>,
    /// The engine and the broker that are linked, by their connections.
    linked: tokio::sync::Mutex<Option<(usize, usize)>>,
}

impl BrokerLauncher {
    /// Does not connect yet.
    pub fn new(config: BrokerConfig, socket: PathBuf) -> Self {
        let (connections, receiver) = mpsc::unbounded_channel();
        Self {
            config,
            socket,
            current: Mutex::new(None),
            connecting: tokio::sync::Mutex::new(false),
            connections,
            receiver: Mutex::new(Some(receiver)),
            linked: tokio::sync::Mutex::new(None),
        }
    }

    /// The program is there.
    pub fn is_installed(&self) -> bool {
        self.config.program.is_file()
    }

    /// Streams of reports, one for each connection. The first caller gets them.
    pub fn connections(&self) -> Option<mpsc::UnboundedReceiver<BrokerNews>> {
        self.receiver.lock().take()
    }

    /// The broker, if this daemon is connected to it.
    pub fn running(&self) -> Option<Arc<Broker>> {
        self.current.lock().clone()
    }

    /// Forgets the connection, so that the next use makes a new one.
    pub fn disconnected(&self) {
        self.current.lock().take();
    }

    /// A connection to the broker, which is started if it does not run. `kept` reads the authority of the host, and
    /// `keep` stores a new one.
    pub async fn connected(
        &self,
        kept: impl AsyncFnOnce() -> Result<Option<Authority>, Error>,
        keep: impl AsyncFnOnce(Authority) -> Result<(), Error>,
    ) -> Result<Arc<Broker>, Error> {
        if let Some(broker) = self.running() {
            return Ok(broker);
        }
        let ended = self.connecting.lock().await;
        if *ended {
            return Err(BrokerCallError::from(LinkError::Closed).into());
        }
        if let Some(broker) = self.running() {
            return Ok(broker);
        }
        let (broker, news) = match Broker::connect(&self.socket).await {
            Ok(connected) => connected,
            Err(BrokerCallError::Refused(BrokerError::Version { ours, theirs })) => {
                tracing::warn!(
                    found = ours,
                    wanted = theirs,
                    "forkd-broker is of another version; it ends"
                );
                self.end_process()
                    .await
                    .map_err(|source| self.failed(source))?;
                self.start().await?
            }
            Err(_) => self.start().await?,
        };
        let stored = kept().await?;
        let is_new = stored.is_none();
        let authority = broker.authority(stored).await?;
        if is_new {
            keep(authority).await?;
        }
        let broker = Arc::new(broker);
        *self.current.lock() = Some(Arc::clone(&broker));
        // The receiver may be gone when the daemon stops.
        let _ = self.connections.send(news);
        Ok(broker)
    }

    /// Makes sure that the engine hands its connections to this broker.
    pub async fn link(&self, net: &NetLauncher, broker: &Arc<Broker>) -> Result<(), Error> {
        let mut linked = self.linked.lock().await;
        let engine = net.connected().await?;
        let both = (Arc::as_ptr(&engine).addr(), Arc::as_ptr(broker).addr());
        if *linked == Some(both) {
            return Ok(());
        }
        *linked = None;
        let (ours, theirs) =
            broker_pair().map_err(Error::io("make", "the link to forkd-broker"))?;
        broker.engine(&theirs).await?;
        engine.set_broker(&ours).await?;
        *linked = Some(both);
        Ok(())
    }

    /// The engine is another one, or gone: the next use links again.
    pub async fn unlink(&self) {
        *self.linked.lock().await = None;
    }

    /// Ends the broker, if it runs. No other is started.
    pub async fn end(&self) -> std::io::Result<()> {
        let mut ended = self.connecting.lock().await;
        *ended = true;
        self.disconnected();
        match self.socket.exists() {
            true => self.end_process().await,
            false => Ok(()),
        }
    }

    async fn end_process(&self) -> std::io::Result<()> {
        let path = self.socket.clone();
        tokio::task::spawn_blocking(move || end_broker(&path))
            .await
            .map_err(std::io::Error::other)?
    }

    async fn start(&self) -> Result<(Broker, BrokerNews), BrokerCallError> {
        let roots = self.config.roots.iter();
        let arguments: Vec<OsString> = roots
            .flat_map(|path| ["--roots".into(), path.into()])
            .collect();
        program::start(
            &self.config.program,
            &self.socket,
            &arguments,
            async |socket: &Path| Broker::connect(socket).await,
            |_| false,
        )
        .await
        .map_err(|error| match error {
            NotStarted::Io(source) => self.failed(source),
            NotStarted::Connect(error) => error,
        })
    }

    fn failed(&self, source: std::io::Error) -> BrokerCallError {
        BrokerCallError::Connect {
            path: self.config.program.clone(),
            source,
        }
    }
}
