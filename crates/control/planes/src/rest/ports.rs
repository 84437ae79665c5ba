//! Routes for the ports of a guest: which there are, who may use them, and a byte stream to one of them.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, FromRequestParts, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use forkd_api::{
    ErrorCode, MAX_PORTS, PortInfo, PortRequest, PortSettings, Role, TCP_PROTOCOL, routes,
};
use forkd_sandboxes::app::App;
use forkd_sandboxes::ports::{dial, listening};
use forkd_sandboxes::sandbox::{Changes, PortChange, SandboxHandle};
use forkd_sandboxes::state::{Access, PortRecord, PortsRecord};

use super::owned::OwnedSandbox;
use super::proxy::parse_port;
use crate::ports::{Ports, TokenKind, pass};
use forkd_edge::auth::Actor;
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::extract::{Body, Held};

/// Host ports below this one are for services of the host.
const FIRST_HOST_PORT: u16 = 1024;

/// The port in a path.
#[derive(Debug)]
pub struct PathPort(u16);

impl<S: Send + Sync> FromRequestParts<S> for PathPort {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let path = Path::<Vec<(String, String)>>::from_request_parts(parts, state).await;
        let path = path.map_err(|_| Failure::new(ErrorCode::InvalidRequest, "no port"))?;
        let port = path.0.iter().find(|(name, _)| name == "port");
        parse_port(port.map_or("", |(_, text)| text)).map(Self)
    }
}

/// The settings of a port, if its host port may be published.
fn checked(app: &App, settings: &PortSettings) -> Result<PortRecord, Failure> {
    let bad = |message: String| Failure::new(ErrorCode::InvalidRequest, message);
    let Some(text) = &settings.host else {
        return Ok(PortRecord {
            access: settings.access.into(),
            host: None,
        });
    };
    let host: SocketAddr = text
        .parse()
        .map_err(|_| bad(format!("{text:?} is not an address such as 127.0.0.1:8080")))?;
    if !host.ip().is_loopback() && !app.config.publish_on.contains(&host.ip()) {
        return Err(Failure::new(
            ErrorCode::Forbidden,
            format!("ports are not published on {} here", host.ip()),
        )
        .with_hint("use 127.0.0.1, or start the daemon with --publish-on ADDRESS"));
    }
    if (1..FIRST_HOST_PORT).contains(&host.port()) {
        return Err(bad(format!(
            "a host port is 0 or {FIRST_HOST_PORT} to 65535"
        )));
    }
    Ok(PortRecord {
        access: settings.access.into(),
        host: Some(host),
    })
}

/// The ports of a request that starts children.
pub fn wished(app: &App, ports: &[PortRequest], children: usize) -> Result<PortsRecord, Failure> {
    let bad = |message: &str| Failure::new(ErrorCode::InvalidRequest, message);
    if ports.len() > MAX_PORTS {
        return Err(bad(&format!("at most {MAX_PORTS} ports")));
    }
    let mut record = PortsRecord::default();
    for wish in ports {
        let settings = PortSettings {
            access: wish.access,
            host: wish.host.clone(),
        };
        let settings = checked(app, &settings)?;
        if children > 1 && settings.host.is_some_and(|host| host.port() != 0) {
            return Err(bad(
                "several children cannot share a host port: publish on port 0",
            ));
        }
        if wish.port == 0 || record.ports.insert(wish.port, settings).is_some() {
            return Err(bad("each port is 1 to 65535 and is named once"));
        }
    }
    Ok(record)
}

/// How the API shows a port.
struct Shown<'a> {
    ports: &'a Ports,
    sandbox: &'a SandboxHandle,
    actor: &'a Actor,
    listening: BTreeMap<u16, IpAddr>,
}

impl<'a> Shown<'a> {
    /// Reads which ports the guest listens on.
    async fn read(ports: &'a Ports, sandbox: &'a SandboxHandle, actor: &'a Actor) -> Answer<Self> {
        let client = sandbox.agent().await?;
        Ok(Self {
            ports,
            sandbox,
            actor,
            listening: listening::list(&client).await?,
        })
    }

    /// The same after a change, which is in force whether the guest answers or not.
    async fn changed(ports: &'a Ports, sandbox: &'a SandboxHandle, actor: &'a Actor) -> Self {
        let read = Self::read(ports, sandbox, actor).await;
        read.unwrap_or_else(|_| Self {
            ports,
            sandbox,
            actor,
            listening: BTreeMap::new(),
        })
    }

    fn port(&self, record: &PortsRecord, port: u16) -> PortInfo {
        let id = &self.sandbox.id;
        let access = record.access(port);
        let address = self.listening.get(&port);
        let host = self.sandbox.published.address(port);
        // A reader may not use ports, so the token is not shown either.
        let token = access == Access::Token && self.actor.role >= Role::Use;
        PortInfo {
            port,
            listening: address.is_some(),
            address: address.map(ToString::to_string),
            access: access.into(),
            url: self.ports.url(id, port),
            path: format!("/v1/sandboxes/{id}/proxy/{port}/"),
            host: host.map(|host| host.to_string()),
            token: token.then(|| self.ports.key.token(TokenKind::Traffic, id)),
        }
    }
}

/// Ports on which programs of the guest listen, and ports that have settings.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/ports", tag = "guest",
    params(("id" = String, Path, description = "Its id")), responses(
    (status = 200, description = "The ports, by number", body = Vec<PortInfo>)
))]
pub async fn list(
    OwnedSandbox(sandbox): OwnedSandbox,
    Extension(ports): Extension<Arc<Ports>>,
    actor: Actor,
) -> Answer<Json<Vec<PortInfo>>> {
    let shown = Shown::read(&ports, &sandbox, &actor).await?;
    let record = sandbox.record().ports;
    let mut all: Vec<u16> = shown
        .listening
        .keys()
        .chain(record.ports.keys())
        .copied()
        .collect();
    all.sort_unstable();
    all.dedup();
    let all = all.into_iter().map(|port| shown.port(&record, port));
    Ok(Json(all.collect()))
}

/// One port of a guest, whether a program listens on it or not.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/ports/{port}", tag = "guest",
    params(("id" = String, Path, description = "Its id"),
        ("port" = u16, Path, minimum = 1, description = "The port in the guest")), responses(
    (status = 200, description = "The port", body = PortInfo)
))]
pub async fn get(
    OwnedSandbox(sandbox): OwnedSandbox,
    PathPort(port): PathPort,
    Extension(ports): Extension<Arc<Ports>>,
    actor: Actor,
) -> Answer<Json<PortInfo>> {
    let shown = Shown::read(&ports, &sandbox, &actor).await?;
    Ok(Json(shown.port(&sandbox.record().ports, port)))
}

/// Sets who may use a port, and publishes it on a host port. Settings replace those that the port had.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/ports/{port}", tag = "guest", request_body = PortSettings,
    params(("id" = String, Path, description = "Its id"),
        ("port" = u16, Path, minimum = 1, description = "The port in the guest")), responses(
    (status = 200, description = "The settings are durable and in force", body = PortInfo)
))]
pub async fn set(
    State(app): State<Arc<App>>,
    OwnedSandbox(sandbox): OwnedSandbox,
    PathPort(port): PathPort,
    Extension(ports): Extension<Arc<Ports>>,
    actor: Actor,
    Body(settings): Body<PortSettings>,
) -> Answer<Json<PortInfo>> {
    let settings = checked(&app, &settings)?;
    change(&sandbox, PortChange::Set(port, settings)).await?;
    let shown = Shown::changed(&ports, &sandbox, &actor).await;
    Ok(Json(shown.port(&sandbox.record().ports, port)))
}

/// Forgets the settings of a port, and closes its host port with all connections.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/ports/{port}", tag = "guest",
    params(("id" = String, Path, description = "Its id"),
        ("port" = u16, Path, minimum = 1, description = "The port in the guest")), responses(
    (status = 204, description = "The port has no settings")
))]
pub async fn forget(
    OwnedSandbox(sandbox): OwnedSandbox,
    PathPort(port): PathPort,
) -> Answer<StatusCode> {
    change(&sandbox, PortChange::Forget(port)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn change(sandbox: &SandboxHandle, change: PortChange) -> Answer<()> {
    let changes = Changes {
        port: Some(change),
        ..Changes::default()
    };
    sandbox.change(changes).await?;
    Ok(())
}

/// Connects to a port of the guest. The connection of the client becomes a byte stream from and to the port; the header
/// `Upgrade: forkd-tcp` asks for it.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/ports/{port}/connect", tag = "guest",
    params(("id" = String, Path, description = "Its id"),
        ("port" = u16, Path, minimum = 1, description = "The port in the guest")), responses(
    (status = 101, description = "Switched to a byte stream")
))]
pub async fn connect(
    OwnedSandbox(sandbox): OwnedSandbox,
    PathPort(port): PathPort,
    held: Held,
    mut request: Request,
) -> Answer<Response> {
    let wanted = request.headers().get(header::UPGRADE);
    if wanted.is_none_or(|wanted| wanted != TCP_PROTOCOL) {
        return Err(Failure::new(
            ErrorCode::InvalidRequest,
            format!("{} is a byte stream", routes::PORT_CONNECT),
        )
        .with_hint(format!(
            "send Connection: Upgrade and Upgrade: {TCP_PROTOCOL} over HTTP/1.1"
        )));
    }
    let guest = dial(&sandbox, port).await?;
    pass::connect(hyper::upgrade::on(&mut request), guest, held);
    let headers = [
        (header::CONNECTION, "Upgrade"),
        (header::UPGRADE, TCP_PROTOCOL),
    ];
    Ok((StatusCode::SWITCHING_PROTOCOLS, headers).into_response())
}
