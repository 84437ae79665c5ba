//! How the gate reads requests to ports.
//!
//! | access | lets in |
//! |---|---|
//! | `public` | every request |
//! | `token` | a request with the access token of the sandbox, or with a token of its owner |
//! | `owner` | a request with a token of the owner |
//!
//! A request that is let in without a token of the owner counts as one of the owner: the owner has opened the port.

use std::sync::Arc;

use axum::extract::Request;
use axum::http::header;
use forkd_api::Role;
use forkd_edge::auth::Actor;
use forkd_edge::errors::Failure;
use forkd_edge::gate::{Gate, Scheme};
use forkd_edge::listen::Peer;
use forkd_sandboxes::state::Access;

use super::{PortTarget, Ports};

/// The scheme of requests to ports.
pub struct PortScheme(pub Arc<Ports>);

impl PortScheme {
    /// The actor of a request that needs no token of the owner.
    fn admitted(&self, target: &PortTarget, request: &Request) -> Option<Actor> {
        let sandbox = self.0.app.sandboxes.get(target.id.as_ref()?).ok()?;
        let record = sandbox.record();
        let open = match record.ports.access(target.port) {
            Access::Public => true,
            Access::Token => self.0.has_token(&sandbox.id, request.headers()),
            Access::Owner => false,
        };
        open.then(|| Actor {
            name: format!("port:{}", sandbox.id),
            owner: record.owner,
            role: Role::Use,
        })
    }
}

impl Scheme for PortScheme {
    fn identify(&self, gate: &Gate, request: &Request, peer: &Peer) -> Result<Actor, Failure> {
        let target = request.extensions().get::<PortTarget>();
        if let Some(actor) = target.and_then(|target| self.admitted(target, request)) {
            return Ok(actor);
        }
        let header = request.headers().get(header::AUTHORIZATION);
        let header = header.and_then(|value| value.to_str().ok());
        match target {
            // The host name is one of the daemon's own, so only the origin of the request is checked.
            Some(target) if target.by_host => gate.identify_by_name(header, request, peer),
            _ => gate.identify(header, request, peer),
        }
    }

    fn role(&self, _: &Request) -> Role {
        Role::Use
    }

    fn guest(&self, request: &Request) -> Option<String> {
        let target = request.extensions().get::<PortTarget>()?;
        Some(target.text.clone())
    }

    fn check_content(&self, _: &Request) -> Result<(), Failure> {
        // The body is for the server in the guest.
        Ok(())
    }

    fn audit_path(&self, request: &Request) -> String {
        let path = request.uri().path();
        match request.extensions().get::<PortTarget>() {
            Some(target) => format!("/ports/{}/{}{path}", target.text, target.port),
            None => path.to_owned(),
        }
    }
}
