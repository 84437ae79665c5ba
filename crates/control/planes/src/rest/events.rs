//! The route that streams events.
//!
//! A client gets the events of its owner only. A client that is too slow gets a `Lagged` event with the number of
//! lost ones.

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use forkd_api::EventKind;
use futures::StreamExt;
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::wrappers::errors::BroadcastStreamRecvError;

use forkd_edge::auth::Actor;
use forkd_edge::errors::Answer;
use forkd_edge::stream::{Framing, respond};
use forkd_sandboxes::app::App;

/// Streams the events of the owner's sandboxes, snapshots and workspaces: NDJSON, or server-sent events if `Accept` asks for them. Each line is an
/// `EventInfo`.
#[utoipa::path(get, path = "/v1/events", tag = "status", responses(
    (status = 200, description = "Events, one a line, until the client goes away", body = String, content_type = "application/x-ndjson")
))]
pub async fn events(
    State(app): State<Arc<App>>,
    actor: Actor,
    headers: HeaderMap,
) -> Answer<Response> {
    let stop = app.stopping.clone();
    let events = BroadcastStream::new(app.events.subscribe())
        .map(move |event| match event {
            Ok(event) => event,
            Err(BroadcastStreamRecvError::Lagged(count)) => app.events.make(
                EventKind::Lagged,
                String::new(),
                Some(format!("{count} events were lost")),
            ),
        })
        .filter(move |event| {
            let shown = event.kind == EventKind::Lagged || actor.owns(event.owner.as_deref());
            std::future::ready(shown)
        })
        .take_until(async move { stop.cancelled().await });
    Ok(respond(Framing::wanted(&headers), events))
}
