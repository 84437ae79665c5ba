//! Requests that are carried out once, however often they are sent.

use std::sync::Arc;

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use forkd_api::ErrorCode;
use serde::Serialize;

use crate::auth::Actor;
use crate::errors::{Answer, Failure};
use forkd_sandboxes::app::App;
use forkd_sandboxes::clock;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::state::{Claim, Db, IdempotencyRecord};
use forkd_sandboxes::trace;

/// The header that names the request.
const HEADER: &str = "idempotency-key";
/// The longest key.
const MAX_KEY: usize = 128;

type Made = Result<(StatusCode, serde_json::Result<serde_json::Value>), Failure>;

/// Carries `work` out unless a request with the same key was answered before; then gives that answer. It is carried out
/// to its end, and the key settled, also if the client goes away.
pub async fn once(
    app: &Arc<App>,
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
        db: app.db.clone(),
        actor: actor.0.clone(),
        key: key.to_owned(),
        fingerprint: fingerprint(what, request),
    };
    detached(keyed.once(work)).await
}

/// In a task of its own: whoever waits for it may stop waiting.
async fn detached<T: Send + 'static>(
    work: impl Future<Output = Answer<T>> + Send + 'static,
) -> Answer<T> {
    trace::spawn(work).await.map_err(|_| Error::Task)?
}

/// A request with a key.
struct Keyed {
    db: Db,
    actor: String,
    key: String,
    fingerprint: String,
}

impl Keyed {
    async fn once(self, work: impl Future<Output = Made> + Send + 'static) -> Answer<Response> {
        let Self {
            db,
            actor,
            key,
            fingerprint,
        } = self;
        let claim = db
            .claim(actor.clone(), key.clone(), fingerprint, clock::unix())
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
                // Apart, so that the key is settled after a panic too.
                let made = detached(work)
                    .await
                    .and_then(|(status, body)| Ok((status, text(body)?)));
                let record = made.as_ref().ok().map(|(status, body)| IdempotencyRecord {
                    status: status.as_u16(),
                    body: body.clone(),
                });
                db.settle(actor, key, record).await.map_err(Error::from)?;
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
    use std::time::Duration;
    use tokio::sync::oneshot;

    fn keyed(db: &Db) -> Keyed {
        Keyed {
            db: db.clone(),
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
