//! Routes that pack snapshots into artifacts and unpack artifacts.
//!
//! Both directions are one tar stream. A bounded channel connects the connection to the thread that reads or writes files, so
//! a slow client holds no memory, and a client that goes away ends the work.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Json;
use axum::body::{Body as RawBody, Bytes};
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use forkd_api::{ErrorCode, MemoryWish, SnapshotInfo, UnpackPlan};
use forkd_types::Tag;
use serde::Deserialize;
use tokio::sync::mpsc;
use utoipa::IntoParams;

use super::owned::VisibleSnapshot;
use forkd_edge::auth::Actor;
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::extract::{Chunks, Params};
use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::ops::branch::parse_tag;
use forkd_sandboxes::ops::hub::{self, PackRequest, UnpackRequest};
use forkd_sandboxes::owners::Access;
use forkd_sandboxes::trace;

/// Chunks between the connection and the thread that works on files.
const AHEAD: usize = 8;
/// Bytes that are collected before they are sent.
const CHUNK: usize = 256 << 10;
/// Longest description of an artifact.
const MAX_DESCRIPTION: usize = 1000;
/// A client learns the reason of a refusal only after it has sent its body, so the rest is read for this long.
const DRAIN: Duration = Duration::from_secs(20);

/// How a snapshot is packed.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct PackParams {
    /// Pack the snapshot although it holds keys or tokens.
    #[serde(default)]
    allow_secrets: bool,
    /// Description of the artifact, for people.
    #[param(max_length = 1000)]
    description: Option<String>,
}

/// How an artifact is unpacked.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct UnpackParams {
    /// Tag of the new snapshot; that of the publisher if missing.
    tag: Option<String>,
    /// Treatment of the memory: `auto`, `require` or `never`.
    #[serde(default)]
    memory: MemoryWish,
}

/// Packs a snapshot as an OCI layout in a tar stream. A body may hold the documents of an artifact that the target has;
/// packs of that artifact are then used and not sent.
#[utoipa::path(post, path = "/v1/snapshots/{tag}/pack", tag = "hub",
    params(("tag" = String, Path, description = "Its name"), PackParams),
    request_body(content = String, content_type = "application/octet-stream"), responses(
    (status = 200, description = "The artifact; a body that breaks off is not whole", body = String, content_type = "application/x-tar")
))]
pub async fn pack(
    State(app): State<Arc<App>>,
    VisibleSnapshot(tag): VisibleSnapshot,
    Params(params): Params<PackParams>,
    body: Chunks,
) -> Answer<Response> {
    if let Some(text) = &params.description
        && text.len() > MAX_DESCRIPTION
    {
        return Err(Failure::new(
            ErrorCode::InvalidRequest,
            format!("a description has at most {MAX_DESCRIPTION} bytes"),
        ));
    }
    let base = with_body(body, |stream| hub::base(&app, stream)).await?;
    // Set when the client goes away while the snapshot is packed.
    let gone = CancelOnDrop(Arc::new(AtomicBool::new(false)));
    let request = PackRequest {
        tag,
        base,
        allow_secrets: params.allow_secrets,
        description: params.description,
    };
    let packed = hub::pack(&app, request, Arc::clone(&gone.0)).await?;
    let (length, digest) = (packed.length(), packed.digest());
    let (sender, receiver) = mpsc::channel(AHEAD);
    tokio::task::spawn_blocking(move || {
        let out = io::BufWriter::with_capacity(CHUNK, ToBody(sender.clone()));
        if let Err(error) = packed.write(out) {
            // The status is sent already; a broken body is all that is left to say.
            let _ = sender.blocking_send(Err(io::Error::other(error)));
        }
    });
    let content = futures::stream::unfold(receiver, |mut receiver| async move {
        Some((receiver.recv().await?, receiver))
    });
    let mut response = RawBody::from_stream(content).into_response();
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static("application/x-tar");
    headers.insert(header::CONTENT_TYPE, kind);
    headers.insert(header::CONTENT_LENGTH, length.into());
    if let Ok(digest) = HeaderValue::from_str(&digest) {
        headers.insert("x-artifact-digest", digest);
    }
    Ok(response)
}

/// Says how an artifact would be unpacked, and which of its packs are missing here. The body holds its documents.
#[utoipa::path(post, path = "/v1/hub/check", tag = "hub", params(UnpackParams),
    request_body(content = String, content_type = "application/octet-stream"), responses(
    (status = 200, description = "The plan", body = UnpackPlan)
))]
pub async fn check(
    State(app): State<Arc<App>>,
    actor: Actor,
    Params(params): Params<UnpackParams>,
    body: Chunks,
) -> Answer<Json<UnpackPlan>> {
    let request = request(&app, &actor, params)?;
    let plan = with_body(body, |stream| hub::check(&app, request, stream)).await?;
    Ok(Json(plan))
}

/// Unpacks an artifact. The body is an OCI layout in a tar stream with its documents first, as `pack` gives it.
#[utoipa::path(post, path = "/v1/hub/unpack", tag = "hub", params(UnpackParams),
    request_body(content = String, content_type = "application/octet-stream"), responses(
    (status = 201, description = "The snapshot is durable", body = SnapshotInfo)
))]
pub async fn unpack(
    State(app): State<Arc<App>>,
    actor: Actor,
    Params(params): Params<UnpackParams>,
    body: Chunks,
) -> Answer<Response> {
    let request = request(&app, &actor, params)?;
    let made = with_body(body, |stream| {
        let app = Arc::clone(&app);
        // A task of its own: it cleans up after a client that goes away.
        let work = trace::spawn(async move { hub::unpack(&app, request, stream).await });
        async move { work.await.map_err(|_| Error::Task)? }
    })
    .await?;
    Ok((axum::http::StatusCode::CREATED, Json(made)).into_response())
}

fn request(app: &App, actor: &Actor, params: UnpackParams) -> Result<UnpackRequest, Failure> {
    let may_use = |tag: &Tag| app.owners.access(|owner| actor.owns(owner), tag) > Access::None;
    let visible = app
        .store
        .list()
        .into_iter()
        .map(|entry| entry.tag().clone());
    Ok(UnpackRequest {
        tag: params.tag.as_deref().map(parse_tag).transpose()?,
        owner: actor.owner.clone(),
        memory: params.memory,
        visible: visible.filter(may_use).collect(),
    })
}

/// Runs work that reads the body of the request.
async fn with_body<T, F>(mut body: Chunks, work: impl FnOnce(FromBody) -> F) -> Result<T, Failure>
where
    F: Future<Output = Result<T, Error>>,
{
    let (sender, receiver) = mpsc::channel(AHEAD);
    let work = work(FromBody {
        receiver,
        chunk: Bytes::new(),
        ended: false,
    });
    let mut refused = None;
    let feed = async {
        loop {
            let message = match body.next().await {
                Ok(Some(chunk)) => Message::Chunk(chunk),
                Ok(None) => Message::End,
                Err(failure) => {
                    // Without an end the work fails, and leaves nothing.
                    refused = Some(failure);
                    break;
                }
            };
            let end = matches!(message, Message::End);
            if sender.send(message).await.is_err() || end {
                break;
            }
        }
        drop(sender);
    };
    let (result, ()) = tokio::join!(work, feed);
    match (result, refused) {
        (Ok(value), _) => Ok(value),
        (Err(_), Some(failure)) => Err(failure),
        (Err(error), None) => {
            let rest = async { while let Ok(Some(_)) = body.next().await {} };
            let _ = tokio::time::timeout(DRAIN, rest).await;
            Err(error.into())
        }
    }
}

/// One part of a body on its way to a thread.
enum Message {
    Chunk(Bytes),
    /// The body is whole. A channel that closes without this is a client that went away.
    End,
}

/// The body of a request as a reader.
struct FromBody {
    receiver: mpsc::Receiver<Message>,
    chunk: Bytes,
    ended: bool,
}

impl Read for FromBody {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.chunk.is_empty() && !self.ended {
            match self.receiver.blocking_recv() {
                Some(Message::Chunk(chunk)) => self.chunk = chunk,
                Some(Message::End) => self.ended = true,
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
        let part = self.chunk.split_to(buffer.len().min(self.chunk.len()));
        buffer
            .get_mut(..part.len())
            .unwrap_or_default()
            .copy_from_slice(&part);
        Ok(part.len())
    }
}

/// The body of a response as a writer.
struct ToBody(mpsc::Sender<io::Result<Bytes>>);

impl Write for ToBody {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.0.blocking_send(Ok(Bytes::copy_from_slice(bytes)));
        sent.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Tells the work that its request was dropped.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
