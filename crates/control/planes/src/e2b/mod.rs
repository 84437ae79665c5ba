//! The E2B plane: the protocol of the E2B SDKs over the sandboxes of this daemon.
//!
//! One listener serves three surfaces. [`route`] tells them apart for each request:
//!
//! ```text
//! X-API-KEY and a control path ───────────► control    sandboxes, snapshots, templates (REST)
//! E2b-Sandbox-Id / host PORT-ID.domain ─┬─► envd       port 49983: processes, files (Connect RPC and HTTP)
//! a signed /files URL ──────────────────┘─► interpreter port 49999: code execution (NDJSON)
//!                                         └► proxy      any other port of the guest
//! ```
//!
//! Every surface is behind the gate ([`scheme`]): a control request belongs to the owner of its key, and a request to a
//! sandbox to the owner of that sandbox once its access token is checked. Handlers use the same operations as the REST
//! plane.

mod access;
pub mod config;
mod control;
pub mod envd;
mod error;
mod interpreter;
mod proxy;
mod route;
mod scheme;
mod state;
mod target;
mod text;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use axum::response::{IntoResponse, Response};
use forkd_edge::gate::Gate;
use forkd_sandboxes::app::App;
use tower_http::catch_panic::CatchPanicLayer;

use crate::ports::Ports;
pub use config::E2bConfig;
pub use control::ROUTES as CONTROL_ROUTES;
use error::Refusal;
use route::Surface;
use state::E2b;

/// The version of envd whose features are all there. The SDKs switch features on and off by this number.
const ENVD_VERSION: &str = "0.9.1";

/// The routers behind the gate, one for each surface.
#[derive(Clone)]
struct Planes {
    e2b: Arc<E2b>,
    control: Router,
    envd: Router,
    interpreter: Router,
    proxy: Router,
    others: Router,
}

/// Puts the E2B plane before the other planes of the daemon. Requests that are not E2B's go on to `others`.
pub fn front(
    app: &Arc<App>,
    config: E2bConfig,
    gate: &Gate,
    ports: &Arc<Ports>,
    others: Router,
) -> Router {
    let e2b = Arc::new(E2b::new(Arc::clone(app), config, Arc::clone(ports)));
    let guarded = |router: Router<Arc<E2b>>, surface: Surface| {
        let scheme = Arc::new(scheme::E2bScheme {
            e2b: Arc::clone(&e2b),
            surface,
        });
        let router = router
            .with_state(Arc::clone(&e2b))
            .layer(axum::extract::DefaultBodyLimit::disable())
            .layer(CatchPanicLayer::custom(panicked));
        gate.guard_as(router, scheme)
    };
    let planes = Planes {
        control: guarded(control::router(), Surface::Control),
        envd: guarded(envd::router(), Surface::Envd),
        interpreter: guarded(interpreter::router(), Surface::Interpreter),
        proxy: guarded(proxy::router(), Surface::Proxy),
        others,
        e2b,
    };
    let service = tower::service_fn(move |request: Request<Body>| {
        let planes = planes.clone();
        async move { planes.serve(request).await }
    });
    Router::new().fallback_service(service)
}

impl Planes {
    async fn serve(self, mut request: Request<Body>) -> Result<Response, std::convert::Infallible> {
        use tower::ServiceExt;
        let Some((surface, target)) = route::classify(&self.e2b, &request) else {
            return self.others.oneshot(request).await;
        };
        if let Some(target) = target {
            request.extensions_mut().insert(target);
        }
        route::collapse_slashes(request.uri_mut());
        let router = match surface {
            Surface::Control => self.control,
            Surface::Envd => self.envd,
            Surface::Interpreter => self.interpreter,
            Surface::Proxy => self.proxy,
        };
        router.oneshot(request).await
    }
}

/// The answer to a path or method that the plane does not have.
async fn no_route(request: axum::extract::Request) -> Refusal {
    let path: String = request.uri().path().chars().take(200).collect();
    Refusal::new(
        axum::http::StatusCode::NOT_FOUND,
        format!("there is no route {} {path}", request.method()),
    )
}

fn panicked(panic: Box<dyn std::any::Any + Send + 'static>) -> Response {
    let what = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("unknown");
    tracing::error!(what, "a handler panicked");
    Refusal::new(
        axum::http::StatusCode::INTERNAL_SERVER_ERROR,
        "the daemon met an error of its own; its log says more",
    )
    .into_response()
}
