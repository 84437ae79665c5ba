//! Requests that are carried out once, however often they are sent.

use std::sync::Arc;

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use forkd_api::ErrorCode;
use serde::Serialize;

use super::errors::{Answer, Failure};
use crate::app::App;
use crate::auth::Actor;
use crate::clock;
use crate::db::{Claim, IdempotencyRecord};
use crate::error::Error;

/// The header that names the request.
const HEADER: &str = "idempotency-key";
/// The longest key.
const MAX_KEY: usize = 128;

type Made = Result<(StatusCode, serde_json::Result<serde_json::Value>), Failure>;

/// Carries `work` out unless a request with the same key was answered before; then gives that answer.
pub async fn once(
    app: &Arc<App>,
    actor: &Actor,
    headers: &HeaderMap,
    what: &str,
    request: &impl Serialize,
    work: impl Future<Output = Made>,
) -> Answer<Response> {
    let Some(key) = headers.get(HEADER) else {
        let (status, body) = work.await?;
        return Ok(answer(status, text(body)?));
    };
    let key = key
        .to_str()
        .ok()
        .filter(|key| (1..=MAX_KEY).contains(&key.len()))
        .ok_or_else(|| {
            Failure::new(
                ErrorCode::InvalidRequest,
                format!("an idempotency key has 1 to {MAX_KEY} printable characters"),
            )
        })?
        .to_owned();
    let fingerprint = fingerprint(what, request);
    let claim = app
        .db
        .claim(actor.0.clone(), key.clone(), fingerprint, clock::unix())
        .await
        .map_err(Error::from)?;
    match claim {
        Claim::Done(earlier) => {
            let status = StatusCode::from_u16(earlier.status).unwrap_or(StatusCode::OK);
            Ok(answer(status, earlier.body))
        }
        Claim::Mismatch => Err(Failure::new(
            ErrorCode::IdempotencyMismatch,
            format!("the idempotency key {key:?} was used for another request"),
        )),
        Claim::Pending => Err(Failure::new(
            ErrorCode::Busy,
            format!("the request with the idempotency key {key:?} is being carried out"),
        )
        .with_status(StatusCode::CONFLICT)),
        Claim::New => {
            let made = work
                .await
                .and_then(|(status, body)| Ok((status, text(body)?)));
            let record = made.as_ref().ok().map(|(status, body)| IdempotencyRecord {
                status: status.as_u16(),
                body: body.clone(),
            });
            app.db
                .settle(actor.0.clone(), key, record)
                .await
                .map_err(Error::from)?;
            made.map(|(status, body)| answer(status, body))
        }
    }
}

fn fingerprint(what: &str, request: &impl Serialize) -> String {
    let body = serde_json::to_string(request).unwrap_or_default();
    blake3::hash(format!("{what}\n{body}").as_bytes())
        .to_hex()
        .to_string()
}

fn text(body: serde_json::Result<serde_json::Value>) -> Result<String, Failure> {
    body.map(|body| body.to_string())
        .map_err(|_| Failure::new(ErrorCode::Internal, "the answer could not be written"))
}

fn answer(status: StatusCode, body: String) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}
