//! Streamed responses.
//!
//! [`respond`] sends each item as it comes, in the [`Framing`] that the client accepts. [`holding`] keeps a value, such
//! as a request slot, until the last byte of a response.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, header};
use axum::response::Response;
use futures::{Stream, StreamExt};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use serde::Serialize;

/// How lines are framed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// One JSON object a line.
    Lines,
    /// Server-sent events (`text/event-stream`).
    Events,
}

impl Framing {
    /// Server-sent events if the client accepts them, else lines.
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

/// How long a stream is silent before it says that it lives.
pub const SILENCE: Duration = Duration::from_secs(15);

/// The line of a stream on which nothing else happens.
#[derive(Serialize)]
struct Keepalive {
    #[serde(rename = "type")]
    kind: &'static str,
}

impl Keepalive {
    const KIND: &'static str = "keepalive";
}

/// The items, and `sign` after each `silence` without one.
pub fn alive<T>(
    items: impl Stream<Item = T> + Send + 'static,
    silence: Duration,
    sign: impl Fn() -> T + Send + 'static,
) -> impl Stream<Item = T> + Send {
    let items = Box::pin(items);
    futures::stream::unfold((items, sign), move |(mut items, sign)| async move {
        let item = match tokio::time::timeout(silence, items.next()).await {
            Ok(item) => item?,
            Err(_) => sign(),
        };
        Some((item, (items, sign)))
    })
}

/// A response that sends each item as it comes, and `{"type":"keepalive"}` after 15 seconds without one.
pub fn respond<T: Serialize + 'static>(
    framing: Framing,
    items: impl Stream<Item = T> + Send + 'static,
) -> Response {
    let body = alive(
        items.map(move |item| framing.frame(&item)),
        SILENCE,
        move || {
            framing.frame(&Keepalive {
                kind: Keepalive::KIND,
            })
        },
    );
    let mut response = Response::new(Body::from_stream(body.map(Ok::<_, Infallible>)));
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

/// Keeps `held` until the body of the response was sent to its end or the client is gone.
pub fn holding(response: Response, held: impl Send + Unpin + 'static) -> Response {
    response.map(|body| Body::new(Holding { body, _held: held }))
}

struct Holding<H> {
    body: Body,
    _held: H,
}

impl<H: Unpin> HttpBody for Holding<H> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_silent_stream_says_that_it_lives() {
        let (sender, items) = futures::channel::mpsc::unbounded::<u8>();
        // No silence is short enough to lose an item that is there.
        let mut alive = Box::pin(alive(items, Duration::ZERO, || 0));
        assert_eq!(alive.next().await, Some(0));
        sender.unbounded_send(7).unwrap();
        assert_eq!(alive.next().await, Some(7));
        assert_eq!(alive.next().await, Some(0));
        drop(sender);
        assert_eq!(alive.next().await, None);
    }
    use std::sync::Arc;

    #[tokio::test]
    async fn a_body_holds_until_it_is_dropped() {
        let held = Arc::new(());
        let (sender, items) = futures::channel::mpsc::unbounded::<u8>();
        let response = holding(respond(Framing::Lines, items), Arc::clone(&held));
        let mut body = response.into_body().into_data_stream();
        sender.unbounded_send(7).unwrap();
        assert_eq!(body.next().await.unwrap().unwrap(), "7\n");
        assert_eq!(Arc::strong_count(&held), 2);
        drop(body);
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
