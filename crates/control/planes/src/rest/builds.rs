//! Routes that build images from Dockerfiles and send images as OCI archives.

use std::io;
use std::sync::Arc;

use axum::body::{Body as RawBody, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use forkd_api::{BuildEvent, ErrorCode};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use forkd_builds::{BuildWish, Events, Owns, Upload};
use forkd_edge::auth::Actor;
use forkd_edge::errors::Answer;
use forkd_edge::extract::{Chunks, PathTag};
use forkd_edge::stream::{Framing, respond};
use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::trace;

/// Events that may wait for a slow reader.
const EVENTS: usize = 64;
/// Pieces of an archive that may wait for a slow reader.
const PIECES: usize = 4;

fn owns(actor: &Actor) -> Owns {
    let actor = actor.clone();
    Arc::new(move |owner| actor.owns(owner))
}

/// Builds an image from a Dockerfile. The body is a tar archive: `build.json` (a `BuildImage`), then the files of the
/// context below `context/`. The answer is a stream of events; its last line is `finished` or `failed`. Closing the
/// connection cancels the build.
#[utoipa::path(post, path = "/v1/builds", tag = "images",
    request_body(content = String, content_type = "application/octet-stream"), responses(
    (status = 200, description = "Events, one a line", body = String, content_type = "application/x-ndjson")
))]
pub async fn build(
    State(app): State<Arc<App>>,
    actor: Actor,
    headers: HeaderMap,
    mut body: Chunks,
) -> Answer<Response> {
    let mut upload = Upload::begin(&app).await?;
    while let Some(chunk) = body.next().await? {
        upload.write(&chunk).await?;
    }
    let (request, context) = upload.finish(&app).await?;
    let network = app.default_network();
    let wish = BuildWish::check(request, network, actor.owner.clone(), owns(&actor))?;
    let (sender, receiver) = mpsc::channel(EVENTS);
    trace::spawn(async move {
        let events = Events::new(sender.clone());
        let last = tokio::select! {
            result = forkd_builds::build(&app, wish, context, events) => match result {
                Ok(built) => BuildEvent::Finished {
                    image: built.image,
                    ran: built.ran,
                    cached: built.cached,
                },
                Err(error) => error.event(),
            },
            // The client went away: dropping the build ends its sandbox.
            () = sender.closed() => return,
            () = app.stopping.cancelled() => {
                let error = Error::refused(ErrorCode::ShuttingDown, "the daemon is about to stop");
                forkd_builds::BuildError::from(error).event()
            }
        };
        let _ = sender.send(last).await;
    });
    let events = ReceiverStream::new(receiver);
    Ok(respond(Framing::wanted(&headers), events))
}

/// Sends an image as an OCI archive with one layer.
#[utoipa::path(get, path = "/v1/images/{name}/archive", tag = "images",
    params(("name" = String, Path, description = "Its name")), responses(
    (status = 200, description = "The archive; a body that breaks off is not whole", body = String, content_type = "application/x-tar")
))]
pub async fn export(
    State(app): State<Arc<App>>,
    actor: Actor,
    PathTag(name): PathTag,
) -> Answer<Response> {
    let export = forkd_builds::export(&app, name, actor.owner.clone(), owns(&actor)).await?;
    let (sender, receiver) = mpsc::channel(PIECES);
    let sending = trace::spawn(async move { export.send(sender).await });
    let content = futures::stream::unfold(Some((receiver, sending)), next_piece);
    let mut response = RawBody::from_stream(content).into_response();
    let kind = HeaderValue::from_static("application/x-tar");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(response)
}

type Sending = (
    mpsc::Receiver<Vec<u8>>,
    tokio::task::JoinHandle<Result<(), Error>>,
);

/// The next piece of an archive. One that breaks off ends with an error, so that the client sees it.
async fn next_piece(sending: Option<Sending>) -> Option<(io::Result<Bytes>, Option<Sending>)> {
    let (mut receiver, task) = sending?;
    match receiver.recv().await {
        Some(piece) => Some((Ok(Bytes::from(piece)), Some((receiver, task)))),
        None => match task.await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some((Err(io::Error::other(error)), None)),
            Err(_) => Some((Err(io::Error::other(Error::Task)), None)),
        },
    }
}
