//! The line-based protocol in network namespaces of children, answered by the REST routes of this daemon in process.

use std::sync::Arc;

use axum::Router;
use forkd_edge::listen::Peer;
use forkd_rest_client::Client;
use forkd_sandboxes::netns::LineServer;
use forkd_types::SandboxId;
use futures::FutureExt;
use tokio::net::TcpStream;

use crate::inside::inside;

/// The name of the actor. Only root enters a network namespace, so its clients need no token.
const ACTOR: &str = "netns";

/// A server that answers through `rest`.
pub fn line_server(rest: Router) -> anyhow::Result<LineServer> {
    let inside = inside(rest, |request| {
        request.extensions_mut().insert(Peer {
            remote: ACTOR.to_owned(),
            address: None,
            trusted: Some(ACTOR.to_owned()),
        });
    });
    // No request leaves the process: the address only has to pass the check of Host.
    let client = Client::new(&"http://localhost".parse()?, None)?.inside(inside);
    Ok(Arc::new(move |id: SandboxId, mut stream: TcpStream| {
        let client = client.clone();
        async move {
            // A client that went away needs no answer.
            let _ = client.serve_line(id.as_str(), &mut stream).await;
        }
        .boxed()
    }))
}
