//! Answers that come line by line.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, header};
use axum::response::Response;
use futures::{Stream, StreamExt};
use serde::Serialize;

/// How the lines are wrapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// One JSON object a line.
    Lines,
    /// Server-sent events.
    Events,
}

impl Framing {
    /// Events if the client asks for them, else lines.
    pub fn wanted(headers: &HeaderMap) -> Self {
        let accept = headers
            .get(header::ACCEPT)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default();
        if accept.contains("text/event-stream") {
            Self::Events
        } else {
            Self::Lines
        }
    }

    fn content_type(self) -> &'static str {
        match self {
            Self::Lines => "application/x-ndjson",
            Self::Events => "text/event-stream",
        }
    }

    fn frame(self, item: &impl Serialize) -> Bytes {
        let json = serde_json::to_string(item).unwrap_or_default();
        Bytes::from(match self {
            Self::Lines => format!("{json}\n"),
            Self::Events => format!("data: {json}\n\n"),
        })
    }
}

/// An answer that sends each item as it comes.
pub fn respond<T: Serialize + 'static>(
    framing: Framing,
    items: impl Stream<Item = T> + Send + 'static,
) -> Response {
    let body = items.map(move |item| Ok::<_, Infallible>(framing.frame(&item)));
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static(framing.content_type()),
    );
    headers.insert(
        header::CACHE_CONTROL,
        header::HeaderValue::from_static("no-store"),
    );
    response
}
