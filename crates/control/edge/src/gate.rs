//! What every request passes: a number, a limit, a token, a span, a line in the log.

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use forkd_api::ErrorCode;
use tokio::sync::Semaphore;
use tracing::Instrument;

use crate::audit::{self, Audit, Line};
use crate::auth::{Actor, Auth, Denied};
use crate::config::EdgeConfig;
use crate::errors::{Failure, REQUEST_ID};
use crate::listen::Peer;
use crate::rate::Rates;
use crate::telemetry;

const ID_HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// The longest id that is taken over from the client.
const MAX_ID: usize = 64;

/// The state of the gate, shared by all requests.
#[derive(Debug, Clone)]
pub struct Gate {
    /// Which tokens are valid.
    pub auth: Arc<Auth>,
    /// The record of requests.
    pub audit: Arc<Audit>,
    /// Requests that may be under way.
    slots: Arc<Semaphore>,
    /// Requests that each actor may make.
    rates: Arc<Rates>,
}

impl Gate {
    /// Reads the tokens and opens the audit log.
    pub fn open(config: &EdgeConfig) -> anyhow::Result<Self> {
        Ok(Self {
            auth: Arc::new(Auth::load(config.token_file.as_deref())?),
            audit: Arc::new(Audit::open(
                config.audit_log.as_deref(),
                config.audit_limits,
            )?),
            slots: Arc::new(Semaphore::new(config.max_requests)),
            rates: Arc::new(Rates::new(config.requests_per_second)),
        })
    }

    /// Puts the gate before every route of a plane.
    pub fn guard(&self, plane: Router) -> Router {
        plane.layer(middleware::from_fn_with_state(self.clone(), pass))
    }
}

/// Lets a request through, or not, and writes down what became of it.
async fn pass(State(gate): State<Gate>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let id = request_id(&request);
    let span = telemetry::request_span(&request, &id);
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let peer = request
        .extensions()
        .get::<Peer>()
        .cloned()
        .unwrap_or_default();
    let ua = text(&request, &header::USER_AGENT, 200);
    let (actor, refusal) = match admit(&gate, &request, &peer) {
        Ok(actor) => (actor, None),
        Err((actor, failure)) => (actor, Some(failure)),
    };
    request.extensions_mut().insert(actor.clone());
    let is_refused = refusal.is_some();
    let serve = async {
        if let Some(failure) = refusal {
            return failure.into_response();
        }
        let Ok(_slot) = gate.slots.try_acquire() else {
            return Failure::new(ErrorCode::RateLimited, "too many requests are under way")
                .with_hint("try again in a moment")
                .into_response();
        };
        next.run(request).await
    };
    let mut response = REQUEST_ID
        .scope(id.clone(), serve)
        .instrument(span.clone())
        .await;
    telemetry::answered(&span, response.status());
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(ID_HEADER, value);
    }
    let status = response.status().as_u16();
    let latency = started.elapsed();
    crate::metrics::request_served(&method, latency);
    tracing::debug!(%method, path, status, actor = %actor, id, us = forkd_sandboxes::clock::micros(latency), "request");
    if !matches!(path.as_str(), "/healthz" | "/healthz/" | "/metrics") {
        let line = Line {
            ts: audit::now_text(),
            actor: actor.0,
            remote: peer.remote.clone(),
            method: method.to_string(),
            path,
            status,
            latency_us: forkd_sandboxes::clock::micros(latency),
            ua,
            request_id: id,
            ..Line::default()
        };
        if is_refused {
            let key = peer.key().map(|address| address.to_string());
            gate.audit
                .write_refused(key.as_ref().unwrap_or(&peer.remote), line);
        } else {
            gate.audit.write(line);
        }
    }
    response
}

fn admit(gate: &Gate, request: &Request, peer: &Peer) -> Result<Actor, (Actor, Failure)> {
    let nobody = || Actor("-".to_owned());
    if matches!(request.uri().path(), "/healthz" | "/healthz/") {
        return Ok(Actor::anonymous());
    }
    let actor = match &peer.trusted {
        // Whoever may open the daemon's own socket may do what the daemon may do.
        Some(user) => Actor(user.clone()),
        None => {
            let header = request
                .headers()
                .get(header::AUTHORIZATION)
                .and_then(|value| value.to_str().ok());
            gate.auth.check(header).map_err(|denied| {
                let (code, message) = match denied {
                    Denied::Missing => (ErrorCode::MissingToken, "missing bearer token"),
                    Denied::Invalid => (ErrorCode::InvalidToken, "invalid bearer token"),
                };
                let failure = Failure::new(code, message)
                    .with_hint("send the header Authorization: Bearer <token> (FORKD_TOKEN)");
                (nobody(), failure)
            })?
        }
    };
    if gate.rates.take(&actor.0) {
        Ok(actor)
    } else {
        let failure = Failure::new(
            ErrorCode::RateLimited,
            format!("{actor} makes too many requests"),
        )
        .with_hint("slow down, or start the daemon with a higher --requests-per-second");
        Err((actor, failure))
    }
}

fn request_id(request: &Request) -> String {
    let given = text(request, &ID_HEADER, MAX_ID + 1);
    let good = (1..=MAX_ID).contains(&given.len())
        && given
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    if good {
        given
    } else {
        format!("{:016x}", rand::random::<u64>())
    }
}

fn text(request: &Request, name: &HeaderName, limit: usize) -> String {
    request
        .headers()
        .get(name)
        .and_then(|value| value.to_str().ok())
        .map(|text| text.chars().take(limit).collect())
        .unwrap_or_default()
}
