//! Extractors: parsed parts of requests.
//!
//! Every rejection is a [`Failure`], so clients always get JSON. Bodies have limits: a JSON body in size and time, a
//! streamed body in the pause between two chunks.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body as RawBody, BodyDataStream, Bytes};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use forkd_api::ErrorCode;
use forkd_types::{SandboxId, Tag};
use futures::StreamExt;
use serde::de::DeserializeOwned;

use crate::auth::Actor;
use crate::errors::Failure;
use crate::listen::ConnectionSlot;
use crate::origin::{content_type, is_json, not_json};
use crate::rate::Slot;

/// The largest JSON body.
pub const MAX_BODY: usize = 2 << 20;
/// How long a JSON body may take to arrive.
const BODY_DEADLINE: Duration = Duration::from_secs(30);
/// How long a streamed body may pause between two chunks.
const CHUNK_DEADLINE: Duration = Duration::from_secs(30);

/// A JSON body. An empty one is `{}`: clients send none where every field has a default.
#[derive(Debug)]
pub struct Body<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &S) -> Result<Self, Failure> {
        let kind = content_type(request.headers());
        let bytes = whole(request.into_body(), MAX_BODY).await?;
        let json = kind.as_deref().is_some_and(is_json);
        if !json && (kind.is_some() || !bytes.is_empty()) {
            return Err(not_json(kind.as_deref()));
        }
        let bytes = if bytes.is_empty() {
            Bytes::from_static(b"{}")
        } else {
            bytes
        };
        serde_json::from_slice(&bytes).map(Self).map_err(|error| {
            let failure = Failure::new(
                ErrorCode::InvalidRequest,
                format!("the body is not what this route takes: {error}"),
            );
            if error.is_data() {
                failure.with_status(StatusCode::UNPROCESSABLE_ENTITY)
            } else {
                failure
            }
        })
    }
}

/// Reads a body to its end, within a limit on its size and on its time.
pub async fn whole(body: RawBody, limit: usize) -> Result<Bytes, Failure> {
    let reading = axum::body::to_bytes(body, limit);
    tokio::time::timeout(BODY_DEADLINE, reading)
        .await
        .map_err(|_| too_slow(BODY_DEADLINE))?
        .map_err(|error| {
            let mut source: Option<&(dyn std::error::Error + 'static)> = Some(&error);
            while let Some(cause) = source {
                if cause.is::<http_body_util::LengthLimitError>() {
                    return Failure::new(
                        ErrorCode::TooLarge,
                        format!("the body has more than {limit} bytes"),
                    );
                }
                source = cause.source();
            }
            Failure::new(
                ErrorCode::InvalidRequest,
                "the body could not be read to its end",
            )
        })
}

fn too_slow(limit: Duration) -> Failure {
    Failure::new(
        ErrorCode::InvalidRequest,
        format!("the body did not arrive within {} s", limit.as_secs()),
    )
    .with_status(StatusCode::REQUEST_TIMEOUT)
}

/// A body of any length, chunk by chunk. A client that stops sending is given up.
#[derive(Debug)]
pub struct Chunks(BodyDataStream);

impl Chunks {
    pub fn of(body: RawBody) -> Self {
        Self(body.into_data_stream())
    }

    /// The next chunk; none at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        self.next_within(CHUNK_DEADLINE).await
    }

    /// The same for a client that may pause for this long.
    pub async fn next_within(&mut self, limit: Duration) -> Result<Option<Bytes>, Failure> {
        match tokio::time::timeout(limit, self.0.next()).await {
            Err(_) => Err(too_slow(limit)),
            Ok(None) => Ok(None),
            Ok(Some(Ok(chunk))) => Ok(Some(chunk)),
            Ok(Some(Err(_))) => Err(Failure::new(
                ErrorCode::InvalidRequest,
                "the body could not be read to its end",
            )),
        }
    }
}

impl<S: Send + Sync> FromRequest<S> for Chunks {
    type Rejection = Infallible;

    async fn from_request(request: Request, _: &S) -> Result<Self, Infallible> {
        Ok(Self::of(request.into_body()))
    }
}

/// The slots of a request. The gate holds them until the end of the response; a handler that goes on after that, such as a
/// WebSocket, keeps a clone.
#[derive(Debug, Clone, Default)]
pub struct Held {
    _slots: Arc<(Vec<Slot>, Option<ConnectionSlot>)>,
}

impl Held {
    pub(super) fn new(slots: Vec<Slot>, connection: Option<ConnectionSlot>) -> Self {
        Self {
            _slots: Arc::new((slots, connection)),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Held {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned().unwrap_or_default())
    }
}

/// A tag in the path.
#[derive(Debug)]
pub struct PathTag(pub Tag);

impl<S: Send + Sync> FromRequestParts<S> for PathTag {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let text = segment(parts, state).await?;
        let tag = text.parse().map_err(|error| {
            Failure::new(
                ErrorCode::InvalidName,
                format!("{text:?} is no name: {error}"),
            )
        })?;
        Ok(Self(tag))
    }
}

/// A sandbox id in the path. A text that is no id names no sandbox.
#[derive(Debug)]
pub struct PathId(pub SandboxId);

impl<S: Send + Sync> FromRequestParts<S> for PathId {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let text = segment(parts, state).await?;
        text.parse().map(Self).map_err(|_| {
            let shown: String = text.chars().take(80).collect();
            Failure::new(
                ErrorCode::SandboxNotFound,
                format!("there is no sandbox {shown}"),
            )
            .with_hint("GET /v1/sandboxes (forkd ls) lists those that live")
        })
    }
}

/// The first variable segment of the path.
async fn segment<S: Send + Sync>(parts: &mut Parts, state: &S) -> Result<String, Failure> {
    let Path(values) = Path::<Vec<(String, String)>>::from_request_parts(parts, state)
        .await
        .map_err(|_| Failure::new(ErrorCode::InvalidRequest, "the path is not UTF-8"))?;
    Ok(values
        .into_iter()
        .next()
        .map(|(_, value)| value)
        .unwrap_or_default())
}

/// The query string, parsed into `T`.
#[derive(Debug)]
pub struct Params<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Params<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        Query::<T>::from_request_parts(parts, state)
            .await
            .map(|Query(value)| Self(value))
            .map_err(|error| {
                Failure::new(
                    ErrorCode::InvalidRequest,
                    format!(
                        "the query is not what this route takes: {}",
                        error.body_text()
                    ),
                )
            })
    }
}

/// Who makes the request. The gate identified the actor; a request that did not pass the gate has none.
impl<S: Send + Sync> FromRequestParts<S> for Actor {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        parts
            .extensions
            .get::<Self>()
            .cloned()
            .ok_or_else(|| Failure::new(ErrorCode::MissingToken, "missing bearer token"))
    }
}
