//! Requests to servers in the guest, on any port but those of the plane.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use forkd_api::ErrorCode;
use forkd_edge::extract::Held;

use super::error::{Answer, Refusal};
use super::state::E2b;
use super::target::Reached;
use crate::ports::pass::pass_on;

/// Every path is the guest's.
pub fn router() -> Router<Arc<E2b>> {
    Router::new().fallback(proxy)
}

async fn proxy(
    State(e2b): State<Arc<E2b>>,
    reached: Reached,
    held: Held,
    mut request: Request,
) -> Answer<Response> {
    if reached.port == 0 {
        return Err(Refusal::bad("a port is 1 to 65535"));
    }
    e2b.ports.strip(request.headers_mut());
    let sent = request.uri().path_and_query();
    let target = sent.map_or("/", |sent| sent.as_str()).parse();
    let target = target.map_err(|_| Refusal::bad("the path cannot be passed on"))?;
    let answer = pass_on(&reached.sandbox, reached.port, target, held, request).await;
    match answer {
        Ok(answer) => Ok(answer.into_response()),
        Err(failure) => {
            let status = failure.status();
            let body = failure.into_body();
            if body.code == ErrorCode::PortClosed {
                return Err(Refusal::port_closed(reached.sandbox.id.as_str()));
            }
            Err(Refusal::new(status, body.error))
        }
    }
}
