//! The REST routes of this daemon for callers in the same process.

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use forkd_rest_client::Inside;
use futures::FutureExt;
use tower::ServiceExt;

/// Answers requests through `rest`. `dress` adds the peer and the token by which the gate knows the caller.
pub fn inside(rest: Router, dress: impl Fn(&mut Request<Body>) + Send + Sync + 'static) -> Inside {
    Inside::new(move |request| {
        let mut request = request.map(Body::new);
        dress(&mut request);
        let rest = rest.clone();
        async move {
            let response = match rest.oneshot(request).await {
                Ok(response) => response,
                Err(never) => match never {},
            };
            response.map(|body| reqwest::Body::wrap_stream(body.into_data_stream()))
        }
        .boxed()
    })
}
