//! The view of the fleet, and a client for each node.
//!
//! Every second each node is asked what it has. A node that cannot be reached leaves the view at once, by the request that
//! found out or by the next look, and comes back with the first look that succeeds.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use forkd_api::{ErrorCode, FleetNode, NodeInfo, SnapshotStatus};
use forkd_edge::errors::Failure;
use forkd_fleet::{Members, NodeView, View};
use forkd_rest_client::{Client, Error, Target};
use forkd_types::{NodeName, chain};
use futures::future::join_all;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// How often nodes are asked.
const LOOK: Duration = Duration::from_secs(1);
/// How long a node may take to answer.
const ANSWER: Duration = Duration::from_secs(2);

/// The nodes of the fleet.
#[derive(Debug)]
pub struct Nodes {
    members: Members,
    token: Option<String>,
    node_ca: Option<Vec<u8>>,
    state: Mutex<State>,
    /// One look at a time.
    looking: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    view: Arc<View>,
    /// Every member by its address, reachable or not.
    status: BTreeMap<String, FleetNode>,
    clients: HashMap<String, Clients>,
}

/// The clients of one node. They share nothing, so a request of a client never carries the token of the gateway.
#[derive(Debug, Clone)]
struct Clients {
    /// Sends no token of its own.
    plain: Client,
    /// Sends the token of the gateway.
    own: Client,
}

impl Nodes {
    /// No node is known yet.
    pub fn new(members: Members, token: Option<String>, node_ca: Option<Vec<u8>>) -> Self {
        Self {
            members,
            token,
            node_ca,
            state: Mutex::default(),
            looking: tokio::sync::Mutex::default(),
        }
    }

    /// The fleet as it was last seen.
    pub fn view(&self) -> Arc<View> {
        Arc::clone(&self.state.lock().view)
    }

    /// Every member, reachable or not.
    pub fn status(&self) -> Vec<FleetNode> {
        self.state.lock().status.values().cloned().collect()
    }

    /// A client of a node that sends no token of its own.
    pub fn client(&self, name: &NodeName) -> Result<Client, Failure> {
        let state = self.state.lock();
        let url = state.view.nodes.get(name).map(|node| &node.url);
        let clients = url.and_then(|url| state.clients.get(url));
        clients.map(|clients| clients.plain.clone()).ok_or_else(|| {
            let known = state.status.values().any(|one| {
                one.node.as_ref().and_then(|node| node.name.as_deref()) == Some(name.as_str())
            });
            lost(name, known)
        })
    }

    /// Takes a node out of the view until a look reaches it again.
    pub fn mark_lost(&self, name: &NodeName, reason: &str) {
        let mut state = self.state.lock();
        let mut view = View::clone(&state.view);
        let Some(node) = view.nodes.remove(name) else {
            return;
        };
        state.view = Arc::new(view);
        if let Some(status) = state.status.get_mut(&node.url) {
            status.reachable = false;
            status.error = Some(reason.to_owned());
        }
        tracing::warn!(%name, url = node.url, reason, "a node is lost");
    }

    /// Looks at the fleet every second until the gateway stops.
    pub async fn watch(self: Arc<Self>, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(LOOK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => self.look().await,
                () = stop.cancelled() => return,
            }
        }
    }

    /// Asks every node what it has.
    pub async fn look(&self) {
        let _one = self.looking.lock().await;
        let urls = match self.members.list().await {
            Ok(members) => members.into_iter().map(|member| member.url).collect(),
            Err(error) => {
                // Forks and commands go on with the nodes that are known.
                tracing::warn!(error = chain(&error), "the list of nodes stays as it is");
                self.state.lock().status.keys().cloned().collect::<Vec<_>>()
            }
        };
        let found = join_all(urls.iter().map(|url| self.ask(url))).await;
        let mut view = View::default();
        let mut status = BTreeMap::new();
        for (url, outcome) in urls.into_iter().zip(found) {
            let mut entry = FleetNode {
                url: url.clone(),
                reachable: false,
                error: None,
                node: None,
            };
            match outcome {
                Ok((info, node)) => {
                    let name: Option<NodeName> = info.name.as_deref().and_then(|n| n.parse().ok());
                    entry.node = Some(info);
                    match name {
                        None => {
                            entry.error =
                                Some("its daemon has no name: start it with --node NAME".to_owned())
                        }
                        Some(name) if view.nodes.contains_key(&name) => {
                            entry.error = Some(format!("another node has the name {name}"));
                        }
                        Some(name) => {
                            entry.reachable = true;
                            view.nodes.insert(name, node);
                        }
                    }
                }
                Err(reason) => {
                    let before = self
                        .state
                        .lock()
                        .status
                        .get(&url)
                        .and_then(|one| one.node.clone());
                    entry.node = before;
                    entry.error = Some(reason);
                }
            }
            status.insert(url, entry);
        }
        let mut state = self.state.lock();
        state.clients.retain(|url, _| status.contains_key(url));
        state.status = status;
        state.view = Arc::new(view);
    }

    async fn ask(&self, url: &str) -> Result<(NodeInfo, NodeView), String> {
        let clients = self.clients_of(url)?;
        let own = &clients.own;
        let asking = async {
            let info = own.node().await?;
            let (snapshots, workspaces) =
                futures::future::try_join(own.snapshots(), own.workspaces()).await?;
            let node = NodeView {
                url: url.to_owned(),
                load: info.load,
                free_slots: u32::try_from(info.max_sandboxes.saturating_sub(info.sandboxes))
                    .unwrap_or(u32::MAX),
                draining: info.draining,
                tags: snapshots
                    .into_iter()
                    .filter(|snapshot| snapshot.status == SnapshotStatus::Ready)
                    .map(|snapshot| snapshot.tag)
                    .collect(),
                workspaces: workspaces
                    .into_iter()
                    .map(|workspace| workspace.name)
                    .collect(),
            };
            Ok::<_, Error>((info, node))
        };
        match tokio::time::timeout(ANSWER, asking).await {
            Ok(outcome) => outcome.map_err(|error| chain(&error)),
            Err(_) => Err(format!("it did not answer within {ANSWER:?}")),
        }
    }

    fn clients_of(&self, url: &str) -> Result<Clients, String> {
        if let Some(clients) = self.state.lock().clients.get(url) {
            return Ok(clients.clone());
        }
        let target: Target = url.parse().map_err(|error| format!("{error}"))?;
        let build = |token: Option<String>| {
            match &self.node_ca {
                Some(pem) => Client::trusting(&target, token, pem),
                None => Client::new(&target, token),
            }
            .map_err(|error| chain(&error))
        };
        let clients = Clients {
            plain: build(None)?,
            own: build(self.token.clone())?,
        };
        let mut state = self.state.lock();
        state.clients.insert(url.to_owned(), clients.clone());
        Ok(clients)
    }
}

/// The answer for a node that is not in the view.
fn lost(name: &NodeName, known: bool) -> Failure {
    if known {
        Failure::new(
            ErrorCode::NodeLost,
            format!("the node {name} does not answer"),
        )
        .with_hint("its sandboxes are back when the node is; GET /v1/nodes says more")
    } else {
        Failure::new(
            ErrorCode::NodeNotFound,
            format!("the fleet has no node {name}"),
        )
        .with_hint("GET /v1/nodes lists the nodes")
    }
}
