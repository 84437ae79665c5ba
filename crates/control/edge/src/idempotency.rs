//! Requests with an `Idempotency-Key`: executed at most once, however often they are sent.
//!
//! The key belongs to the actor. The first request claims it, executes and settles it with the response; a repeated one gets
//! that response. The work runs in a task of its own to its end, also if the client goes away.

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use forkd_api::ErrorCode;
use serde::Serialize;

use crate::auth::Actor;
use crate::errors::{Answer, Failure};
use forkd_sandboxes::error::Error;
use forkd_sandboxes::state::{Claim, Db, IdempotencyRecord as Settled};
use forkd_sandboxes::{clock, trace};

/// The header that names the request.
const HEADER: &str = "idempotency-key";
/// The longest key.
const MAX_KEY: usize = 128;

type Made = Result<(StatusCode, serde_json::Result<serde_json::Value>), Failure>;

/// Where keys are kept.
pub trait Keys: Clone + Send + Sync + 'static {
    /// Why the store of keys failed.
    type Error: Into<Failure> + Send;

    /// Claims a key for a request, which is known by its fingerprint.
    fn claim(
        &self,
        actor: String,
        key: String,
        fingerprint: String,
    ) -> impl Future<Output = Result<Claim, Self::Error>> + Send;

    /// Keeps the response of a claimed key; without one the key is free again.
    fn settle(
        &self,
        actor: String,
        key: String,
        response: Option<Settled>,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send;
}

impl Keys for Db {
    type Error = Error;

    async fn claim(&self, actor: String, key: String, request: String) -> Result<Claim, Error> {
        Ok(self.claim_key(actor, key, request, clock::unix()).await?)
    }

    async fn settle(
        &self,
        actor: String,
        key: String,
        response: Option<Settled>,
    ) -> Result<(), Error> {
        Ok(self.settle_key(actor, key, response).await?)
    }
}

/// Executes `work`, or returns the response of an earlier request with the same key.
pub async fn once(
    keys: &impl Keys,
    actor: &Actor,
    headers: &HeaderMap,
    what: &str,
    request: &impl Serialize,
    work: impl Future<Output = Made> + Send + 'static,
) -> Answer<Response> {
    let Some(key) = headers.get(HEADER) else {
        let (status, body) = detached(work).await?;
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
        })?;
    let keyed = Keyed {
        keys: keys.clone(),
        // Tokens of two owners may have one name over time.
        actor: format!("{}/{}", actor.owner, actor.name),
        key: key.to_owned(),
        fingerprint: fingerprint(what, request),
    };
    detached(keyed.once(work)).await
}

/// Runs in a task of its own, so that a caller that stops waiting does not cancel the work.
async fn detached<T: Send + 'static>(
    work: impl Future<Output = Answer<T>> + Send + 'static,
) -> Answer<T> {
    trace::spawn(work)
        .await
        .map_err(|_| Failure::new(ErrorCode::Internal, "an internal task ended early"))?
}

/// A request with a key.
struct Keyed<K> {
    keys: K,
    actor: String,
    key: String,
    fingerprint: String,
}

impl<K: Keys> Keyed<K> {
    async fn once(self, work: impl Future<Output = Made> + Send + 'static) -> Answer<Response> {
        let Self {
            keys,
            actor,
            key,
            fingerprint,
        } = self;
        let claim = keys
            .claim(actor.clone(), key.clone(), fingerprint)
            .await
            .map_err(Into::into)?;
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
                // In a task of its own, so that the key is settled after a panic too.
                let made = detached(work)
                    .await
                    .and_then(|(status, body)| Ok((status, text(body)?)));
                let record = made.as_ref().ok().map(|(status, body)| Settled {
                    status: status.as_u16(),
                    body: body.clone(),
                });
                keys.settle(actor, key, record).await.map_err(Into::into)?;
                made.map(|(status, body)| answer(status, body))
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use forkd_sandboxes::state::Db;
    use std::time::Duration;
    use tokio::sync::oneshot;

    fn keyed(db: &Db) -> Keyed<Db> {
        Keyed {
            keys: db.clone(),
            actor: "me".into(),
            key: "k".into(),
            fingerprint: "f".into(),
        }
    }

    #[tokio::test]
    async fn a_client_that_goes_away_leaves_an_answer_behind() {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::open(&dir.path().join("state.db")).unwrap();
        let (begun, has_begun) = oneshot::channel();
        let (go, may_go) = oneshot::channel::<()>();
        let client = tokio::spawn(detached(keyed(&db).once(async move {
            begun.send(()).unwrap();
            may_go.await.unwrap();
            Ok((StatusCode::CREATED, Ok("made".into())))
        })));
        has_begun.await.unwrap();
        client.abort();
        assert!(client.await.unwrap_err().is_cancelled());
        go.send(()).unwrap();
        let again = async {
            loop {
                let never = async { panic!("carried out twice") };
                if let Ok(answer) = keyed(&db).once(never).await {
                    return answer.status();
                }
            }
        };
        let status = tokio::time::timeout(Duration::from_secs(30), again).await;
        assert_eq!(status.unwrap(), StatusCode::CREATED);
    }

    #[tokio::test]
    async fn work_that_panics_gives_its_key_free() {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::open(&dir.path().join("state.db")).unwrap();
        assert!(
            keyed(&db)
                .once(async { panic!("on purpose") })
                .await
                .is_err()
        );
        let good = async { Ok((StatusCode::OK, Ok("made".into()))) };
        assert_eq!(
            keyed(&db).once(good).await.unwrap().status(),
            StatusCode::OK
        );
    }
}
