//! The server behind a route of a daemon, as streamable HTTP.
//!
//! There are no sessions: a call acts for the sender of its own request, and no state of one client can be reached by
//! another. A client cancels a call by closing the response.

use std::sync::Arc;

use forkd_rest_client::Client;
use http::request::Parts;
use rmcp::transport::streamable_http_server::session::never::NeverSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use tokio_util::sync::CancellationToken;

use crate::options::Options;
use crate::server::Tools;

/// The largest request of a client, in bytes.
const MAX_REQUEST: usize = 4 << 20;

/// The service for `/mcp`.
pub type Service = StreamableHttpService<Tools, NeverSessionManager>;

/// A service whose calls use the client that `client` makes from their request. It ends its streams with `stopping`.
///
/// The caller has checked the sender, `Host` and `Origin` of the request.
pub fn service(
    client: impl Fn(&Parts) -> Client + Send + Sync + 'static,
    options: Options,
    stopping: CancellationToken,
) -> Service {
    let (client, options) = (Arc::new(client), Arc::new(options));
    let config = StreamableHttpServerConfig::default()
        .with_legacy_session_mode(false)
        .with_json_response(true)
        .with_max_request_body_bytes(MAX_REQUEST)
        .with_cancellation_token(stopping)
        .disable_allowed_hosts();
    StreamableHttpService::new(
        move || Ok(Tools::of_requests(client.clone(), Arc::clone(&options))),
        Arc::new(NeverSessionManager::default()),
        config,
    )
}
