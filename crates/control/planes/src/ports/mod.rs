//! Ports of guests over HTTP, for every plane.
//!
//! ```text
//! host PORT-ID.domain ──────────────────┬─► access ──► pass ──► the server in the guest
//! Forkd-Sandbox-Id, Forkd-Sandbox-Port ─┤   (scheme)
//! host and headers of E2B ──────────────┘
//! /v1/sandboxes/{id}/proxy/{port}/… ──► owner (REST) ─► pass
//! ```
//!
//! [`front`] puts the plane before the others: a request whose host or headers name a port never reaches another plane.
//! The gate lets a request in by the access that the port has ([`scheme`]), and counts it as a request of the owner of
//! the sandbox. The E2B plane has its own refusals and resumes paused sandboxes, but uses [`Ports`] for access and
//! [`pass`] for the request itself.

mod domain;
mod key;
pub mod pass;
mod scheme;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use forkd_api::{ACCESS_HEADER, ErrorCode, PORT_HEADER, SANDBOX_HEADER};
use forkd_edge::auth::Actor;
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::extract::Held;
use forkd_edge::gate::Gate;
use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::sandbox::SandboxHandle;
use forkd_types::SandboxId;
use tower_http::catch_panic::CatchPanicLayer;

pub use domain::Domain;
pub use key::{AccessKey, TokenKind};

/// The header of the E2B protocol with the access token of a port.
const E2B_ACCESS_HEADER: &str = "e2b-traffic-access-token";
/// Headers of the daemon that the server in the guest does not get.
const NOT_PASSED: &[&str] = &[
    SANDBOX_HEADER,
    PORT_HEADER,
    ACCESS_HEADER,
    E2B_ACCESS_HEADER,
    "e2b-sandbox-id",
    "e2b-sandbox-port",
    "x-access-token",
    "x-api-key",
];

/// The host names of ports.
#[derive(Debug, Clone, Default)]
pub struct PortNames {
    /// The domain; ports have no host names without one.
    pub domain: Option<Domain>,
    /// Clients reach the domain over TLS.
    pub tls: bool,
}

/// State that all requests to ports share.
pub struct Ports {
    pub app: Arc<App>,
    pub key: AccessKey,
    names: PortNames,
    gate: Gate,
}

/// The port that a request names.
#[derive(Debug, Clone)]
pub struct PortTarget {
    /// The ID as it was sent.
    pub text: String,
    /// None if the text is no sandbox ID.
    pub id: Option<SandboxId>,
    pub port: u16,
    /// The host of the request names the port.
    pub by_host: bool,
}

impl Ports {
    /// Reads the key of access tokens, and makes one at the first start.
    pub fn open(app: &Arc<App>, names: PortNames, gate: &Gate) -> anyhow::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            key: AccessKey::open(&app.config.data_dir)?,
            app: Arc::clone(app),
            names,
            gate: gate.clone(),
        }))
    }

    /// The URL of a port under its host name.
    pub fn url(&self, id: &SandboxId, port: u16) -> Option<String> {
        let scheme = if self.names.tls { "https" } else { "http" };
        let domain = self.names.domain.as_ref()?;
        Some(format!("{scheme}://{port}-{id}.{domain}/"))
    }

    /// The port that the host or the headers of a request name.
    pub fn target<B>(&self, request: &axum::http::Request<B>) -> Option<PortTarget> {
        let headers = request.headers();
        let by_host = || {
            let domain = self.names.domain.as_ref()?;
            let (port, text) = domain.names(request.uri(), headers)?;
            Some((port, text, true))
        };
        let (port, text, by_host) = by_headers(headers).or_else(by_host)?;
        Some(PortTarget {
            id: text.parse().ok(),
            text: text.chars().take(80).collect(),
            port,
            by_host,
        })
    }

    /// Whether the host or the headers of a request name a port, in the way of any plane.
    pub fn names<B>(&self, request: &axum::http::Request<B>) -> bool {
        request.headers().contains_key("e2b-sandbox-id") || self.target(request).is_some()
    }

    /// Whether a request carries the access token of a sandbox.
    pub fn has_token(&self, id: &SandboxId, headers: &HeaderMap) -> bool {
        [ACCESS_HEADER, E2B_ACCESS_HEADER].iter().any(|name| {
            let given = headers.get(*name).and_then(|value| value.to_str().ok());
            given.is_some_and(|given| self.key.is_token(TokenKind::Traffic, id, given))
        })
    }

    /// Removes headers that are meant for the daemon. `Authorization` goes on to the guest unless it holds a token of
    /// this daemon: the guest is not trusted with one.
    pub fn strip(&self, headers: &mut HeaderMap) {
        for name in NOT_PASSED {
            headers.remove(*name);
        }
        if self.gate.holds_token(headers) {
            headers.remove(axum::http::header::AUTHORIZATION);
        }
    }
}

fn by_headers(headers: &HeaderMap) -> Option<(u16, String, bool)> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let id = text(SANDBOX_HEADER)?;
    // A port that is no number is refused later, with a message.
    let port = text(PORT_HEADER).and_then(|port| port.parse().ok());
    Some((port.unwrap_or(0), id.to_owned(), false))
}

/// Puts the plane of ports before the other planes of the daemon.
pub fn front(ports: &Arc<Ports>, others: Router) -> Router {
    let guarded = Router::new()
        .fallback(serve)
        .with_state(Arc::clone(ports))
        .layer(axum::extract::DefaultBodyLimit::disable())
        .layer(CatchPanicLayer::custom(crate::rest::panicked));
    let scheme = scheme::PortScheme(Arc::clone(ports));
    let guarded = ports.gate.guard_as(guarded, Arc::new(scheme));
    let ports = Arc::clone(ports);
    let service = tower::service_fn(move |mut request: Request<Body>| {
        use tower::ServiceExt;
        let target = ports.target(&request);
        let router = match target {
            Some(target) => {
                request.extensions_mut().insert(target);
                guarded.clone()
            }
            None => others.clone(),
        };
        async move { router.oneshot(request).await }
    });
    Router::new().fallback_service(service)
}

async fn serve(
    State(ports): State<Arc<Ports>>,
    actor: Actor,
    held: Held,
    mut request: Request,
) -> Answer<Response> {
    let target = request.extensions().get::<PortTarget>().cloned();
    let target = target.ok_or_else(|| bad("the request names no port"))?;
    if target.port == 0 {
        return Err(bad("a port is 1 to 65535"));
    }
    let sandbox = find(&ports.app, &target)?;
    // The gate has checked the access; an actor of another owner finds nothing.
    if !actor.owns(Some(&sandbox.owner())) {
        return Err(missing(&target));
    }
    ports.strip(request.headers_mut());
    let sent = request.uri().path_and_query();
    let path = sent.map_or("/", |sent| sent.as_str()).parse();
    let path = path.map_err(|_| bad("the path cannot be passed on"))?;
    let answer = pass::pass_on(&sandbox, target.port, path, held, request).await?;
    Ok(answer.into_response())
}

fn bad(message: &str) -> Failure {
    Failure::new(ErrorCode::InvalidRequest, message)
}

fn find(app: &App, target: &PortTarget) -> Result<Arc<SandboxHandle>, Failure> {
    let id = target.id.as_ref().ok_or_else(|| missing(target))?;
    Ok(app.sandboxes.get(id)?)
}

fn missing(target: &PortTarget) -> Failure {
    match &target.id {
        Some(id) => Error::NoSandbox { id: id.clone() }.into(),
        None => Failure::new(
            ErrorCode::SandboxNotFound,
            format!("there is no sandbox {:?}", target.text),
        ),
    }
}
