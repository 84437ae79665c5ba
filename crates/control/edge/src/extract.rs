//! Parts of requests, parsed; what does not parse is answered as JSON.

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use forkd_api::ErrorCode;
use forkd_types::{SandboxId, Tag};
use serde::de::DeserializeOwned;

use crate::auth::Actor;
use crate::errors::Failure;

/// The largest JSON body.
pub const MAX_BODY: usize = 2 << 20;

/// A JSON body. An empty one is `{}`: clients send none where every field has a default.
#[derive(Debug)]
pub struct Body<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &S) -> Result<Self, Failure> {
        let kind = request
            .headers()
            .get(header::CONTENT_TYPE)
            .map(|value| value.to_str().unwrap_or_default().to_ascii_lowercase());
        let bytes = read(request, MAX_BODY).await?;
        let json = kind.as_deref().is_some_and(is_json);
        if !json && (kind.is_some() || !bytes.is_empty()) {
            return Err(Failure::new(
                ErrorCode::UnsupportedMediaType,
                match kind {
                    Some(kind) => format!("the body is {kind:?}, not JSON"),
                    None => "the request does not say what its body is".to_owned(),
                },
            )
            .with_hint("send the header Content-Type: application/json"));
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

fn is_json(kind: &str) -> bool {
    let kind = kind.split(';').next().unwrap_or_default().trim();
    kind == "application/json" || kind.ends_with("+json")
}

async fn read(request: Request, limit: usize) -> Result<Bytes, Failure> {
    axum::body::to_bytes(request.into_body(), limit)
        .await
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

/// A sandbox id in the path. What is no id names no sandbox.
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

/// The query.
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

/// Who makes the request; the gate puts it there.
impl<S: Send + Sync> FromRequestParts<S> for Actor {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        Ok(parts
            .extensions
            .get::<Self>()
            .cloned()
            .unwrap_or_else(Self::anonymous))
    }
}
