//! The life of the gateway: bind, watch the fleet, serve, stop.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{Method, header};
use axum::response::{IntoResponse, Response};
use forkd_edge::config::ConnectionLimits;
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::listen::{self, Server, Tls};
use forkd_edge::origin::Hosts;
use parking_lot::RwLock;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::args::Settings;
use crate::nodes::Nodes;
use crate::route::{Route, route};
use crate::{create, merge, own, pass};

/// How long requests may go on after the gateway was told to stop.
const DRAIN: Duration = Duration::from_secs(10);

/// Everything that requests share.
#[derive(Debug)]
pub struct Gateway {
    pub nodes: Arc<Nodes>,
    hosts: Hosts,
}

/// Serves until SIGTERM or SIGINT.
pub async fn run(settings: Settings) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let tls: Option<Tls> = match &settings.tls {
        Some(files) => Some(Arc::new(RwLock::new(listen::load_tls(files)?))),
        None => None,
    };
    let mut bound = Vec::new();
    for address in &settings.listen {
        bound.push(listen::bind(address).await?);
    }
    let nodes = Arc::new(Nodes::new(
        settings.members,
        settings.token,
        settings.node_ca,
    ));
    // The first requests find a view.
    nodes.look().await;
    let stop = CancellationToken::new();
    let watching = tokio::spawn(Arc::clone(&nodes).watch(stop.clone()));
    let gateway = Arc::new(Gateway {
        nodes,
        hosts: Hosts::new(&settings.allow_host),
    });
    let router = Router::new().fallback(handle).with_state(gateway);
    let server = Server::new(router, tls, ConnectionLimits::default(), stop.clone());
    let accepting: Vec<_> = bound
        .into_iter()
        .map(|bound| tokio::spawn(server.clone().accept(bound)))
        .collect();
    tracing::info!(addresses = ?settings.listen, version = env!("CARGO_PKG_VERSION"), "listening");
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    stop.cancel();
    for task in accepting {
        let _ = task.await;
    }
    let _ = watching.await;
    if tokio::time::timeout(DRAIN, server.drained()).await.is_err() {
        tracing::warn!("requests were still under way");
    }
    Ok(())
}

async fn handle(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    let answer = answer(&gateway, request).await;
    answer.unwrap_or_else(IntoResponse::into_response)
}

async fn answer(gateway: &Gateway, request: Request) -> Answer<Response> {
    // A client without a token may be a page in a browser. The nodes do not see its host.
    if !request.headers().contains_key(header::AUTHORIZATION) {
        gateway.hosts.check(request.uri(), request.headers())?;
    }
    let nodes = &gateway.nodes;
    match route(request.method(), request.uri().path())? {
        Route::Health => Ok(own::health(nodes)),
        Route::Version => Ok(own::version()),
        Route::Metrics => Ok(own::metrics(nodes)),
        Route::Nodes => own::nodes(nodes, &request.into_parts().0.headers).await,
        Route::Node { name, path } => pass::to_path(nodes, &name, &path, request).await,
        Route::Sandbox(id) => match id.node() {
            Some(node) => pass::to(nodes, &node, request).await,
            None => Err(own::no_node(&id)),
        },
        Route::Create => create::sandboxes(nodes, request).await,
        Route::Build => create::snapshot(nodes, request).await,
        Route::CreateWorkspace => create::workspace(nodes, request).await,
        Route::List(list) => merge::list(nodes, list, request).await,
        Route::Events => merge::events(nodes, request).await,
        Route::Snapshot(tag) if *request.method() == Method::GET => {
            pass::to(nodes, &own::holder(nodes, &tag).await?, request).await
        }
        Route::Snapshot(tag) => merge::at_holders(nodes, &tag, request).await,
        Route::Workspace(name) => {
            pass::to(nodes, &own::host_of(nodes, &name).await?, request).await
        }
        Route::Any => pass::to(nodes, &own::any(nodes)?, request).await,
        Route::PerNode => Err(Failure::new(
            forkd_api::ErrorCode::Unsupported,
            "this belongs to one node and not to the fleet",
        )
        .with_hint("ask a node through the gateway: /v1/nodes/NAME and then the path")),
    }
}
