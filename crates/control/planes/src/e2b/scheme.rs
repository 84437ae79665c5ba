//! How the gate reads requests of the E2B plane.
//!
//! A control request carries the token of an owner in `X-API-KEY`, or as a bearer token. A data request carries the access
//! token of one sandbox, and it counts as a request of the owner of that sandbox.

use std::sync::Arc;

use axum::extract::Request;
use axum::http::{Method, header};
use axum::response::{IntoResponse, Response};
use forkd_api::{ErrorCode, Role};
use forkd_edge::auth::Actor;
use forkd_edge::errors::Failure;
use forkd_edge::gate::{Gate, Scheme};
use forkd_edge::listen::Peer;
use forkd_edge::origin;

use super::access;
use super::error::Refusal;
use super::route::Surface;
use super::state::E2b;
use super::target::Target;

/// The owner under which requests to sandboxes that do not run are counted.
const UNKNOWN: &str = "e2b:unknown";

/// The scheme of one surface.
pub struct E2bScheme {
    pub e2b: Arc<E2b>,
    pub surface: Surface,
}

impl E2bScheme {
    fn of_control(&self, gate: &Gate, request: &Request, peer: &Peer) -> Result<Actor, Failure> {
        let text = |name: &str| {
            let value = request.headers().get(name)?;
            value.to_str().ok()
        };
        let header = match text("x-api-key") {
            Some(key) => Some(format!("Bearer {key}")),
            None => text(header::AUTHORIZATION.as_str()).map(str::to_owned),
        };
        gate.identify(header.as_deref(), request, peer)
            .map_err(|failure| {
                if failure.status() == axum::http::StatusCode::UNAUTHORIZED {
                    return Failure::new(ErrorCode::InvalidToken, "missing or invalid API key")
                        .with_hint("E2B_API_KEY is a token of this daemon");
                }
                failure
            })
    }

    /// A sandbox that does not run is refused by the handler, which looks for a paused one.
    fn of_sandbox(&self, request: &Request) -> Result<Actor, Failure> {
        let unknown = Actor {
            name: UNKNOWN.to_owned(),
            owner: UNKNOWN.to_owned(),
            role: Role::Use,
        };
        let target = request.extensions().get::<Target>();
        let live = target
            .and_then(|target| target.id.as_ref())
            .and_then(|id| self.e2b.app.sandboxes.get(id).ok())
            .filter(|sandbox| sandbox.phase().answers());
        let (Some(target), Some(sandbox)) = (target, live) else {
            return Ok(unknown);
        };
        let record = sandbox.record();
        let access = record.ports.access(target.port);
        let sent = access::Credentials {
            method: request.method(),
            uri: request.uri(),
            headers: request.headers(),
        };
        access::check(&self.e2b, &sandbox.id, target.port, access, sent).map_err(|refusal| {
            Failure::new(ErrorCode::InvalidToken, refusal.message).with_status(refusal.status)
        })?;
        Ok(Actor {
            name: format!("e2b:{}", sandbox.id),
            owner: record.owner,
            role: Role::Use,
        })
    }
}

impl Scheme for E2bScheme {
    fn identify(&self, gate: &Gate, request: &Request, peer: &Peer) -> Result<Actor, Failure> {
        match self.surface {
            Surface::Control => self.of_control(gate, request, peer),
            Surface::Envd | Surface::Interpreter | Surface::Proxy => self.of_sandbox(request),
        }
    }

    fn role(&self, request: &Request) -> Role {
        match (self.surface, request.method()) {
            (Surface::Control, &Method::GET | &Method::HEAD) => Role::Read,
            _ => Role::Use,
        }
    }

    fn guest(&self, request: &Request) -> Option<String> {
        let target = request.extensions().get::<Target>()?;
        Some(target.text.clone())
    }

    fn check_content(&self, request: &Request) -> Result<(), Failure> {
        match self.surface {
            Surface::Control => origin::check_content(request),
            // A page cannot send the header with the token, and the ports of a sandbox are public by design.
            Surface::Envd | Surface::Interpreter | Surface::Proxy => Ok(()),
        }
    }

    fn audit_path(&self, request: &Request) -> String {
        let path = request.uri().path();
        match request.extensions().get::<Target>() {
            Some(target) => format!("/e2b/{}/{}{path}", target.text, target.port),
            None => path.to_owned(),
        }
    }

    fn refuse(&self, failure: Failure) -> Response {
        Refusal::from(failure).into_response()
    }
}
