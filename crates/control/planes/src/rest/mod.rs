//! The REST plane.
//!
//! Handlers translate HTTP requests into operations of `forkd-sandboxes` and results into responses. They take no
//! decisions. `owned` is the one place that enforces ownership.

mod builds;
mod checkpoints;
mod document;
mod events;
mod exec;
mod files;
mod hub;
mod images;
mod interpreters;
mod network;
mod node;
mod owned;
mod ports;
mod processes;
mod proxy;
mod range;
pub(crate) mod sandboxes;
mod secrets;
mod snapshots;
mod stats;
mod status;
mod terminal;
mod tokens;
mod workspaces;

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use forkd_api::ErrorCode;
use tower_http::catch_panic::CatchPanicLayer;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::ports::Ports;
use forkd_edge::errors::Failure;
use forkd_edge::tokens::Tokens;
use forkd_sandboxes::app::App;
use forkd_sandboxes::health;
use forkd_sandboxes::node::LoadMeter;

/// The OpenAPI document with its title and tags.
#[derive(Debug, OpenApi)]
#[openapi(
    info(
        title = "forkd",
        description = "fork(2) for machines: microVMs that start copy-on-write from a warm parent.\n\n\
Every refusal is an `ErrorBody`; each route lists the codes it can be refused with. A path that is no route is answered with \
404 `no_such_route`, a method that a route does not take with 405 `method_not_allowed`.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    modifiers(&Security),
    tags(
        (name = "status", description = "Is the daemon well"),
        (name = "snapshots", description = "Frozen machines"),
        (name = "hub", description = "Frozen machines on their way between hosts"),
        (name = "images", description = "What machines boot from"),
        (name = "sandboxes", description = "Live machines"),
        (name = "guest", description = "What happens inside a live machine"),
        (name = "workspaces", description = "Live machines with a name that can be put to sleep"),
        (name = "store", description = "What lies on disk"),
        (name = "tokens", description = "Who may do what"),
        (name = "secrets", description = "Values that requests of guests get on their way out"),
    ),
    components(schemas(
        forkd_api::ErrorBody,
        forkd_api::BuildImage,
        forkd_api::BuildEvent,
        forkd_api::ExecFrame,
        forkd_api::EventInfo,
        forkd_api::FileChange,
        forkd_api::FlowEntry,
        forkd_api::TerminalStart,
        forkd_api::TerminalInput
    ))
)]
struct Document;

struct Security;

impl utoipa::Modify for Security {
    fn modify(&self, openapi: &mut utoipa::openapi::OpenApi) {
        use utoipa::openapi::security::{
            Http, HttpAuthScheme, SecurityRequirement, SecurityScheme,
        };
        let scheme = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        openapi
            .components
            .get_or_insert_default()
            .add_security_scheme("token", scheme);
        openapi.security = Some(vec![
            SecurityRequirement::default(),
            SecurityRequirement::new::<&str, [&str; 0], &str>("token", []),
        ]);
    }
}

fn api() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(status::healthz))
        .routes(routes!(status::version))
        .routes(routes!(status::metrics))
        .routes(routes!(status::status))
        .routes(routes!(node::node, node::update))
        .routes(routes!(snapshots::list, snapshots::create))
        .routes(routes!(snapshots::update, snapshots::delete))
        .routes(routes!(snapshots::info))
        .routes(routes!(snapshots::compact))
        .routes(routes!(hub::pack))
        .routes(routes!(hub::check))
        .routes(routes!(hub::unpack))
        .routes(routes!(images::list, images::fetch))
        .routes(routes!(images::archive))
        .routes(routes!(images::prune))
        .routes(routes!(builds::build))
        .routes(routes!(builds::export))
        .routes(routes!(images::get, images::remove))
        .routes(routes!(images::operations))
        .routes(routes!(images::operation, images::cancel))
        .routes(routes!(snapshots::usage))
        .routes(routes!(snapshots::fsck))
        .routes(routes!(sandboxes::list, sandboxes::start))
        .routes(routes!(
            sandboxes::get,
            sandboxes::update,
            sandboxes::delete
        ))
        .routes(routes!(stats::stats))
        .routes(routes!(sandboxes::branch))
        .routes(routes!(sandboxes::fork))
        .routes(routes!(checkpoints::list, checkpoints::create))
        .routes(routes!(checkpoints::remove))
        .routes(routes!(checkpoints::rollback))
        .routes(routes!(secrets::list))
        .routes(routes!(secrets::put, secrets::remove))
        .routes(routes!(network::get, network::replace, network::edit))
        .routes(routes!(network::flows))
        .routes(routes!(network::log))
        .routes(routes!(network::reset))
        .routes(routes!(ports::list))
        .routes(routes!(ports::get, ports::set, ports::forget))
        .routes(routes!(ports::connect))
        .routes(routes!(sandboxes::pause))
        .routes(routes!(sandboxes::resume))
        .routes(routes!(sandboxes::logs))
        .routes(routes!(exec::ping))
        .routes(routes!(exec::exec))
        .routes(routes!(exec::exec_stream))
        .routes(routes!(exec::eval))
        .routes(routes!(terminal::terminal))
        .routes(routes!(processes::list, processes::start))
        .routes(routes!(processes::signal))
        .routes(routes!(processes::stdin))
        .routes(routes!(processes::resize))
        .routes(routes!(processes::output))
        .routes(routes!(interpreters::list, interpreters::start))
        .routes(routes!(interpreters::stop))
        .routes(routes!(interpreters::restart))
        .routes(routes!(interpreters::interrupt))
        .routes(routes!(files::read, files::write, files::remove))
        .routes(routes!(files::list))
        .routes(routes!(files::stat))
        .routes(routes!(files::rename))
        .routes(routes!(files::attributes))
        .routes(routes!(files::pack, files::unpack))
        .routes(routes!(files::mkdir))
        .routes(routes!(files::watch))
        .routes(routes!(events::events))
        .routes(routes!(tokens::list, tokens::create))
        .routes(routes!(tokens::revoke))
        .routes(routes!(workspaces::list, workspaces::create))
        .routes(routes!(workspaces::get, workspaces::delete))
        .routes(routes!(workspaces::suspend))
        .routes(routes!(workspaces::resume))
}

/// The OpenAPI document.
pub fn openapi() -> utoipa::openapi::OpenApi {
    let mut document = api().into_openapi();
    document::complete(&mut document);
    document
}

/// The document as it is committed.
pub fn openapi_text() -> String {
    let mut text = openapi().to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

/// The REST plane, without the gate of the front door.
pub fn router(app: Arc<App>, tokens: Arc<Tokens>, ports: Arc<Ports>) -> Router {
    let health = Arc::new(health::of_daemon(&app));
    let (router, mut document) = api().split_for_parts();
    document::complete(&mut document);
    let document = Arc::new(document.to_json().unwrap_or_default());
    router
        .route("/healthz/", axum::routing::get(status::healthz))
        .route(
            forkd_api::routes::OPENAPI,
            axum::routing::get(async move || {
                (
                    [("content-type", "application/json")],
                    document.as_ref().clone(),
                )
            }),
        )
        .route(forkd_api::routes::PROXY, axum::routing::any(proxy::proxy))
        .route(
            forkd_api::routes::PROXY_ROOT,
            axum::routing::any(proxy::proxy),
        )
        .route(
            forkd_api::routes::PROXY_PATH,
            axum::routing::any(proxy::proxy),
        )
        .with_state(Arc::clone(&app))
        .layer(axum::middleware::from_fn_with_state(
            (app, Arc::new(LoadMeter::default())),
            node::with_load,
        ))
        .layer(axum::Extension(health))
        .layer(axum::Extension(tokens))
        .layer(axum::Extension(ports))
        .method_not_allowed_fallback(wrong_method)
        .fallback(no_route)
        .layer(axum::extract::DefaultBodyLimit::disable())
        .layer(CatchPanicLayer::custom(panicked))
}

async fn no_route(request: Request) -> Failure {
    let path: String = request.uri().path().chars().take(200).collect();
    Failure::new(ErrorCode::NoSuchRoute, format!("there is no route {path}"))
        .with_hint("GET /openapi.json describes every route")
}

async fn wrong_method(request: Request) -> Failure {
    let path: String = request.uri().path().chars().take(200).collect();
    Failure::new(
        ErrorCode::MethodNotAllowed,
        format!("{path} does not take {}", request.method()),
    )
    .with_hint("the Allow header says what it takes")
}

pub(crate) fn panicked(panic: Box<dyn std::any::Any + Send + 'static>) -> Response {
    let what = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("unknown");
    tracing::error!(what, "a handler panicked");
    Failure::new(
        ErrorCode::Internal,
        "the daemon met an error of its own; its log says more",
    )
    .into_response()
}
