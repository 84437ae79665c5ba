//! The gate that every request passes: id, token, origin, role, limits, span, audit line.
//!
//! ```text
//! request ─▶ who (token, Unix peer) ─▶ origin ─▶ rate ─▶ role ─▶ content type ─▶ slot ─▶ handler
//!               │ 401                    │ 403     │ 429    │ 403     │ 415          │ 429
//! ```
//!
//! `/healthz` needs no token and takes no slot. A slot is held until the last byte of the response, so streams count, and a
//! WebSocket takes its slot along ([`crate::extract::Held`]). Requests that wait for a guest have a pool of their own with a
//! share for each sandbox: a guest that never answers does not keep others from being used, nor itself from being deleted.

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use forkd_api::{ErrorCode, Role, routes};
use tracing::Instrument;

use crate::audit::{self, Audit, Line};
use crate::auth::{Actor, Auth, Denied};
use crate::config::EdgeConfig;
use crate::errors::{Failure, REQUEST_ID};
use crate::extract::Held;
use crate::listen::{ConnectionSlot, Peer};
use crate::origin::{self, Hosts};
use crate::rate::{Full, Rates, Slots};
use crate::stream::holding;
use crate::{metrics, telemetry};
use forkd_sandboxes::clock;

const ID_HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// The longest id that is taken over from the client.
const MAX_ID: usize = 64;
/// Requests in flight to the guest of one sandbox.
const PER_SANDBOX: usize = 256;
/// Guest requests in flight for each other request in flight: they wait for guests most of the time.
const GUEST_FACTOR: usize = 4;

/// Routes whose answer waits for a guest.
const GUEST_ROUTES: &[&str] = &[
    routes::PING,
    routes::EXEC,
    routes::EXEC_STREAM,
    routes::EVAL,
    routes::FILES,
    routes::FILES_LIST,
    routes::FILES_MKDIR,
    routes::FILES_STAT,
    routes::FILES_RENAME,
    routes::FILES_ATTRIBUTES,
    routes::FILES_ARCHIVE,
    routes::FILES_WATCH,
    routes::TERMINAL,
    routes::PROCESSES,
    routes::PROCESS_SIGNAL,
    routes::PROCESS_STDIN,
    routes::PROCESS_RESIZE,
    routes::PROCESS_OUTPUT,
    routes::PROXY,
    routes::PROXY_ROOT,
    routes::PROXY_PATH,
    routes::PORTS,
    routes::PORT,
    routes::PORT_CONNECT,
    routes::INTERPRETERS,
    routes::INTERPRETER,
    routes::INTERPRETER_RESTART,
    routes::INTERPRETER_INTERRUPT,
];
/// Routes for administrators.
const ADMIN_ROUTES: &[&str] = &[routes::TOKENS, routes::TOKEN, routes::STORE_FSCK];

/// Limits on requests in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestLimits {
    /// Requests of all owners.
    pub total: usize,
    /// Requests of one owner.
    pub per_owner: usize,
    /// Requests that each owner may make in a second; 0 is no limit.
    pub per_second: u32,
}

/// State of the gate.
#[derive(Debug, Clone)]
pub struct Gate {
    pub auth: Arc<Auth>,
    /// The audit log.
    pub audit: Arc<Audit>,
    hosts: Arc<Hosts>,
    rates: Arc<Rates>,
    /// Requests that the daemon answers itself.
    slots: Arc<Slots>,
    /// The same for local administrators, so that they get in when all other slots are taken.
    reserve: Arc<Slots>,
    /// Requests that wait for a guest, by owner.
    guest_slots: Arc<Slots>,
    /// Requests that wait for a guest, by sandbox.
    sandbox_slots: Arc<Slots>,
}

impl Gate {
    /// Reads the tokens and opens the audit log.
    pub fn open(config: &EdgeConfig) -> anyhow::Result<Self> {
        let auth = Arc::new(Auth::load(config.token_file.as_deref())?);
        let audit = Audit::open(config.audit_log.as_deref(), config.audit_limits)?;
        let hosts = Hosts::new(&config.allowed_hosts);
        Ok(Self::new(auth, Arc::new(audit), hosts, config.requests))
    }

    /// Puts the gate before every route of the REST plane.
    pub fn guard(&self, plane: Router) -> Router {
        self.guard_as(plane, Arc::new(Rest))
    }

    /// Puts the gate before every route of a plane that identifies its clients in its own way.
    pub fn guard_as(&self, plane: Router, scheme: Arc<dyn Scheme>) -> Router {
        let guarded = Guarded {
            gate: self.clone(),
            scheme,
        };
        plane.layer(middleware::from_fn_with_state(guarded, pass))
    }

    /// A gate without requests in flight.
    fn new(auth: Arc<Auth>, audit: Arc<Audit>, hosts: Hosts, limits: RequestLimits) -> Self {
        let (total, share) = (limits.total, limits.per_owner);
        Self {
            auth,
            audit,
            hosts: Arc::new(hosts),
            rates: Arc::new(Rates::new(limits.per_second)),
            slots: Slots::new(total, share),
            reserve: Slots::new(total, total),
            guest_slots: Slots::new(
                total.saturating_mul(GUEST_FACTOR),
                share.saturating_mul(GUEST_FACTOR),
            ),
            sandbox_slots: Slots::new(usize::MAX, PER_SANDBOX),
        }
    }

    /// Who sends this `Authorization` header, or the equivalent of another plane.
    fn who(&self, header: Option<&str>, peer: &Peer) -> Result<Actor, Failure> {
        if let Some(user) = &peer.trusted {
            // Root and the daemon's user can read its files anyway, so they need no token. A valid token still says for
            // which owner they act.
            let named = header.and_then(|_| self.auth.check(header).ok());
            return Ok(named.unwrap_or_else(|| Actor::admin(user)));
        }
        let actor = self.auth.check(header).map_err(|denied| {
            let (code, message) = match denied {
                Denied::Missing => (ErrorCode::MissingToken, "missing bearer token"),
                Denied::Invalid => (ErrorCode::InvalidToken, "invalid bearer token"),
            };
            Failure::new(code, message)
                .with_hint("send the header Authorization: Bearer <token> (FORKD_TOKEN)")
        })?;
        Ok(actor)
    }

    /// The same for a request whose host is not checked yet: one without a token must come to a host of this daemon, and
    /// not from a web page of elsewhere.
    pub fn identify(
        &self,
        header: Option<&str>,
        request: &Request,
        peer: &Peer,
    ) -> Result<Actor, Failure> {
        let actor = self.who(header, peer)?;
        if self.is_open_to(peer) {
            self.hosts.check(request.uri(), request.headers())?;
        }
        Ok(actor)
    }

    /// The same for a request to a host name that the plane has recognised as one of its own.
    pub fn identify_by_name(
        &self,
        header: Option<&str>,
        request: &Request,
        peer: &Peer,
    ) -> Result<Actor, Failure> {
        let actor = self.who(header, peer)?;
        if self.is_open_to(peer) {
            origin::check_origin(request.uri(), request.headers())?;
        }
        Ok(actor)
    }

    /// Whether a peer needs no token although any program of the host could be that peer, a browser included.
    fn is_open_to(&self, peer: &Peer) -> bool {
        peer.address.is_some() && !self.auth.is_required()
    }

    /// Whether the headers carry a token of this daemon.
    pub fn holds_token(&self, headers: &HeaderMap) -> bool {
        let header = headers.get(header::AUTHORIZATION);
        let header = header.and_then(|value| value.to_str().ok());
        header.is_some() && self.auth.is_required() && self.auth.check(header).is_ok()
    }

    /// Whether an identified request is let in.
    fn admit(&self, scheme: &dyn Scheme, request: &Request, actor: &Actor) -> Result<(), Failure> {
        if !self.rates.take(&actor.owner) {
            return Err(Failure::new(
                ErrorCode::RateLimited,
                format!("{} makes too many requests", actor.owner),
            )
            .with_hint("slow down, or start the daemon with a higher --requests-per-second"));
        }
        let needed = scheme.role(request);
        if actor.role < needed {
            return Err(Failure::new(
                ErrorCode::Forbidden,
                format!("the token has the role {}, this needs {needed}", actor.role),
            )
            .with_hint("an administrator makes tokens: forkd token create"));
        }
        scheme.check_content(request)
    }

    /// Takes the slots of a request.
    fn slot(
        &self,
        guest: Option<&str>,
        request: &Request,
        actor: &Actor,
        peer: &Peer,
    ) -> Result<Held, Failure> {
        let taken = if peer.trusted.is_some() {
            self.reserve.take(&actor.owner).map(|slot| vec![slot])
        } else if let Some(sandbox) = guest {
            self.guest_slots
                .take(&actor.owner)
                .and_then(|slot| Ok(vec![slot, self.sandbox_slots.take(sandbox)?]))
        } else if matched(request) == Some(routes::MCP) {
            // It waits for requests of its own, which take the slots of their routes.
            self.guest_slots.take(&actor.owner).map(|slot| vec![slot])
        } else {
            self.slots.take(&actor.owner).map(|slot| vec![slot])
        };
        let slots = taken.map_err(|full| {
            let message = match full {
                Full::All => "too many requests are under way".to_owned(),
                Full::Share => format!(
                    "too many requests of {} or to one sandbox are under way",
                    actor.owner
                ),
            };
            Failure::new(ErrorCode::RateLimited, message).with_hint("try again in a moment")
        })?;
        let connection = request.extensions().get::<ConnectionSlot>().cloned();
        Ok(Held::new(slots, connection))
    }
}

/// How the gate reads the requests of a plane: who makes them, what they need, and how a refusal looks.
pub trait Scheme: Send + Sync + 'static {
    /// Who makes the request.
    fn identify(&self, gate: &Gate, request: &Request, peer: &Peer) -> Result<Actor, Failure>;

    /// The least role for the request.
    fn role(&self, request: &Request) -> Role;

    /// The sandbox whose guest the answer waits for.
    fn guest(&self, request: &Request) -> Option<String>;

    /// Refuses a body that a web page could have sent without asking.
    fn check_content(&self, request: &Request) -> Result<(), Failure>;

    /// The path as the audit log shows it.
    fn audit_path(&self, request: &Request) -> String {
        request.uri().path().to_owned()
    }

    /// Whether the request needs neither a token nor a slot.
    fn is_health(&self, _request: &Request) -> bool {
        false
    }

    /// A refusal in the form that clients of the plane read.
    fn refuse(&self, failure: Failure) -> Response {
        failure.into_response()
    }
}

/// The scheme of the REST plane: bearer tokens, and routes by their names.
#[derive(Debug)]
struct Rest;

impl Scheme for Rest {
    fn identify(&self, gate: &Gate, request: &Request, peer: &Peer) -> Result<Actor, Failure> {
        let header = request
            .headers()
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok());
        gate.identify(header, request, peer)
    }

    fn role(&self, request: &Request) -> Role {
        needed_role(request.method(), matched(request))
    }

    fn guest(&self, request: &Request) -> Option<String> {
        matched(request).filter(|route| GUEST_ROUTES.contains(route))?;
        let sandbox = request.uri().path().split('/').nth(3);
        Some(sandbox.unwrap_or_default().to_owned())
    }

    fn check_content(&self, request: &Request) -> Result<(), Failure> {
        match matched(request) {
            // The body is for the server in the guest.
            Some(routes::PROXY | routes::PROXY_ROOT | routes::PROXY_PATH) => Ok(()),
            _ => origin::check_content(request),
        }
    }

    fn is_health(&self, request: &Request) -> bool {
        matches!(request.uri().path(), "/healthz" | "/healthz/")
    }
}

/// A gate and the plane behind it.
#[derive(Clone)]
struct Guarded {
    gate: Gate,
    scheme: Arc<dyn Scheme>,
}

fn matched(request: &Request) -> Option<&str> {
    request
        .extensions()
        .get::<MatchedPath>()
        .map(MatchedPath::as_str)
}

/// The least role for a route.
pub fn needed_role(method: &Method, route: Option<&str>) -> Role {
    match route {
        Some(route) if ADMIN_ROUTES.contains(&route) => Role::Admin,
        Some(routes::NODE) if *method != Method::GET => Role::Admin,
        // A GET by its method, and a shell by what it does.
        Some(
            routes::TERMINAL
            | routes::PORT_CONNECT
            | routes::PROXY
            | routes::PROXY_ROOT
            | routes::PROXY_PATH,
        ) => Role::Use,
        // Each call of a tool is a request of its own with the role of its route.
        Some(routes::MCP) => Role::Read,
        _ if matches!(*method, Method::GET | Method::HEAD) => Role::Read,
        _ => Role::Use,
    }
}

/// Lets a request through or refuses it, and logs the outcome.
async fn pass(State(guarded): State<Guarded>, mut request: Request, next: Next) -> Response {
    let Guarded { gate, scheme } = guarded;
    let started = Instant::now();
    let id = request_id(&request);
    let span = telemetry::request_span(&request, &id);
    let method = request.method().clone();
    let mut line = Line {
        ts: audit::now_text(),
        actor: "-".to_owned(),
        method: method.to_string(),
        path: scheme.audit_path(&request),
        ua: text(&request, &header::USER_AGENT, 200),
        request_id: id.clone(),
        ..Line::default()
    };
    let peer = request.extensions().get::<Peer>().cloned();
    let peer = peer.unwrap_or_default();
    line.remote.clone_from(&peer.remote);
    let health = scheme.is_health(&request);
    let held = match scheme.identify(&gate, &request, &peer) {
        Ok(actor) => {
            line.actor.clone_from(&actor.name);
            request.extensions_mut().insert(actor.clone());
            if health {
                Ok(Held::default())
            } else {
                let admitted = gate.admit(scheme.as_ref(), &request, &actor);
                let guest = scheme.guest(&request);
                admitted.and_then(|()| gate.slot(guest.as_deref(), &request, &actor, &peer))
            }
        }
        Err(_) if health => Ok(Held::default()),
        Err(failure) => Err(failure),
    };
    let is_refused = held.is_err();
    let serve = async {
        match held {
            Ok(held) => {
                request.extensions_mut().insert(held.clone());
                holding(next.run(request).await, held)
            }
            Err(failure) => scheme.refuse(failure),
        }
    };
    let mut response = REQUEST_ID
        .scope(id.clone(), serve)
        .instrument(span.clone())
        .await;
    telemetry::answered(&span, response.status());
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(ID_HEADER, value);
    }
    let latency = started.elapsed();
    metrics::request_served(&method, latency);
    line.status = response.status().as_u16();
    line.latency_us = clock::micros(latency);
    tracing::debug!(%method, path = line.path, status = line.status, actor = line.actor, id, us = line.latency_us, "request");
    if is_refused {
        let key = peer.key().map(|address| address.to_string());
        gate.audit
            .write_refused(key.as_ref().unwrap_or(&peer.remote), line);
    } else if !health && line.path != routes::METRICS {
        gate.audit.write(line);
    }
    response
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
