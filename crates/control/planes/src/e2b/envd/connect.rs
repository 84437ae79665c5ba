//! The Connect protocol: unary calls and streams of enveloped messages.
//!
//! ```text
//! envelope = flags (1 byte: 0 message, 2 end of stream) | length (4 bytes, big endian) | payload
//! ```
//!
//! A stream always answers 200; its result is the last envelope. Compression is not offered, and a client does not use it
//! then. Messages have a limit in size, and a stream is read envelope by envelope.

use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::{Buf, Bytes, BytesMut};
use forkd_api::ErrorCode;
use forkd_edge::errors::Failure;
use forkd_edge::extract::Chunks;
use forkd_guest_proto as guest;
use forkd_sandboxes::error::Error;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::messages::Message;

/// The largest message.
pub const MAX_MESSAGE: usize = 8 << 20;
/// Bytes before a payload.
const HEADER: usize = 5;
/// The flag of the last envelope.
const END: u8 = 0x02;
/// The flag of a compressed payload.
const COMPRESSED: u8 = 0x01;
/// How long a unary body may take to arrive.
const BODY_DEADLINE: Duration = Duration::from_secs(60);

/// How messages are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    Json,
    Proto,
}

/// An error code of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    InvalidArgument,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    FailedPrecondition,
    ResourceExhausted,
    Unauthenticated,
    Unimplemented,
    Unavailable,
    DeadlineExceeded,
    Canceled,
    Internal,
    Unknown,
}

impl Code {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid_argument",
            Self::NotFound => "not_found",
            Self::AlreadyExists => "already_exists",
            Self::PermissionDenied => "permission_denied",
            Self::FailedPrecondition => "failed_precondition",
            Self::ResourceExhausted => "resource_exhausted",
            Self::Unauthenticated => "unauthenticated",
            Self::Unimplemented => "unimplemented",
            Self::Unavailable => "unavailable",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Canceled => "canceled",
            Self::Internal => "internal",
            Self::Unknown => "unknown",
        }
    }

    /// The status of a unary call that fails with the code.
    fn status(self) -> StatusCode {
        match self {
            Self::InvalidArgument | Self::FailedPrecondition => StatusCode::BAD_REQUEST,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::AlreadyExists => StatusCode::CONFLICT,
            Self::PermissionDenied => StatusCode::FORBIDDEN,
            Self::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Self::Unauthenticated => StatusCode::UNAUTHORIZED,
            Self::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Self::Canceled => StatusCode::from_u16(499).unwrap_or(StatusCode::BAD_REQUEST),
            Self::Internal | Self::Unknown => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

/// A failed call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RpcError {
    pub code: Code,
    pub message: String,
}

impl RpcError {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    fn json(&self) -> serde_json::Value {
        json!({"code": self.code.as_str(), "message": self.message})
    }
}

impl From<Error> for RpcError {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::Agent {
                source: forkd_agent_client::Error::Agent(refused),
                ..
            } => agent_code(refused.code),
            error => api_code(error.code()),
        };
        Self::new(code, error.chain())
    }
}

impl From<Failure> for RpcError {
    fn from(failure: Failure) -> Self {
        let body = failure.into_body();
        Self::new(api_code(body.code), body.error)
    }
}

fn agent_code(code: guest::ErrorCode) -> Code {
    use guest::ErrorCode as C;
    match code {
        C::NotFound | C::Gone => Code::NotFound,
        C::Exists => Code::AlreadyExists,
        C::Permission => Code::PermissionDenied,
        C::BadRequest | C::NotDirectory | C::IsDirectory | C::NotEmpty | C::ExecFailed => {
            Code::InvalidArgument
        }
        C::NoSpace | C::Limit | C::Busy => Code::ResourceExhausted,
        C::Unsupported => Code::Unimplemented,
        C::Cancelled => Code::Canceled,
        C::Timeout => Code::DeadlineExceeded,
        _ => Code::Internal,
    }
}

fn api_code(code: ErrorCode) -> Code {
    use ErrorCode as C;
    match code {
        C::InvalidRequest | C::InvalidName | C::UnsupportedMediaType => Code::InvalidArgument,
        C::TooLarge | C::RateLimited | C::LimitReached | C::NoSpace | C::Busy => {
            Code::ResourceExhausted
        }
        C::ProcessNotFound | C::FileNotFound => Code::NotFound,
        C::SandboxNotFound
        | C::SandboxGone
        | C::WrongState
        | C::AgentUnreachable
        | C::ShuttingDown => Code::Unavailable,
        C::MissingToken | C::InvalidToken => Code::Unauthenticated,
        C::Forbidden => Code::PermissionDenied,
        C::AlreadyExists => Code::AlreadyExists,
        C::Unsupported => Code::Unimplemented,
        C::Timeout => Code::DeadlineExceeded,
        _ => Code::Internal,
    }
}

impl IntoResponse for RpcError {
    fn into_response(self) -> Response {
        (self.code.status(), axum::Json(self.json())).into_response()
    }
}

/// The codec of a request, and whether it is a stream.
fn codec(headers: &HeaderMap) -> Result<(Codec, bool), Box<Response>> {
    let kind = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .map(|kind| kind.split(';').next().unwrap_or_default().trim())
        .unwrap_or_default();
    match kind {
        "application/json" => Ok((Codec::Json, false)),
        "application/proto" => Ok((Codec::Proto, false)),
        "application/connect+json" => Ok((Codec::Json, true)),
        "application/connect+proto" => Ok((Codec::Proto, true)),
        _ => {
            let error = RpcError::invalid("the content type is not one of the Connect protocol");
            let answer = (StatusCode::UNSUPPORTED_MEDIA_TYPE, axum::Json(error.json()));
            Err(Box::new(answer.into_response()))
        }
    }
}

fn decode<T: Message + DeserializeOwned>(codec: Codec, bytes: &[u8]) -> Result<T, RpcError> {
    match codec {
        // A message without fields may have no bytes at all.
        Codec::Json if bytes.is_empty() => Ok(T::default()),
        Codec::Json => serde_json::from_slice(bytes)
            .map_err(|error| RpcError::invalid(format!("the message cannot be read: {error}"))),
        Codec::Proto => T::decode(bytes)
            .map_err(|error| RpcError::invalid(format!("the message cannot be read: {error}"))),
    }
}

fn encode<T: Message + Serialize>(codec: Codec, message: &T) -> Vec<u8> {
    match codec {
        Codec::Json => serde_json::to_vec(message).unwrap_or_default(),
        Codec::Proto => message.encode_to_vec(),
    }
}

/// Answers a unary call.
pub async fn unary<Q, A, F>(request: Request, work: impl FnOnce(Q) -> F) -> Response
where
    Q: Message + DeserializeOwned,
    A: Message + Serialize,
    F: Future<Output = Result<A, RpcError>>,
{
    let codec = match codec(request.headers()) {
        Ok((codec, false)) => codec,
        Ok((_, true)) => {
            return RpcError::invalid("this call is not a stream").into_response();
        }
        Err(response) => return *response,
    };
    let answer = async {
        let reading = axum::body::to_bytes(request.into_body(), MAX_MESSAGE);
        let bytes = tokio::time::timeout(BODY_DEADLINE, reading)
            .await
            .map_err(|_| RpcError::new(Code::DeadlineExceeded, "the message did not arrive"))?
            .map_err(|_| {
                RpcError::new(
                    Code::ResourceExhausted,
                    format!("a message has at most {MAX_MESSAGE} bytes"),
                )
            })?;
        work(decode(codec, &bytes)?).await
    };
    match answer.await {
        Ok(answer) => {
            let kind = match codec {
                Codec::Json => "application/json",
                Codec::Proto => "application/proto",
            };
            let mut response = Body::from(encode(codec, &answer)).into_response();
            let value = HeaderValue::from_static(kind);
            response.headers_mut().insert(header::CONTENT_TYPE, value);
            response
        }
        Err(error) => error.into_response(),
    }
}

/// Reads envelopes from the parts of a body.
#[derive(Debug, Default)]
pub struct Envelopes {
    buffer: BytesMut,
}

impl Envelopes {
    /// Adds a part of the body.
    pub fn push(&mut self, part: &[u8]) {
        self.buffer.extend_from_slice(part);
    }

    /// The next whole payload; none if more of the body is needed.
    pub fn next_message(&mut self) -> Result<Option<Bytes>, RpcError> {
        let Some((head, _)) = self.buffer.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let [flags, length @ ..] = *head;
        let length = u32::from_be_bytes(length) as usize;
        if flags & COMPRESSED != 0 {
            return Err(RpcError::new(
                Code::Unimplemented,
                "compressed messages are not taken",
            ));
        }
        if flags != 0 {
            return Err(RpcError::invalid("an envelope has unknown flags"));
        }
        if length > MAX_MESSAGE {
            return Err(RpcError::new(
                Code::ResourceExhausted,
                format!("a message has at most {MAX_MESSAGE} bytes"),
            ));
        }
        if self.buffer.len() < HEADER + length {
            return Ok(None);
        }
        self.buffer.advance(HEADER);
        Ok(Some(self.buffer.split_to(length).freeze()))
    }

    /// Whether nothing of an envelope is left over.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }
}

/// The messages that a client sends on a stream.
pub struct Incoming {
    codec: Codec,
    body: Chunks,
    envelopes: Envelopes,
    /// The client may be silent for this long.
    patience: Duration,
}

impl Incoming {
    /// The next message; none at the end of the stream.
    pub async fn next<T: Message + DeserializeOwned>(&mut self) -> Result<Option<T>, RpcError> {
        loop {
            if let Some(payload) = self.envelopes.next_message()? {
                return decode(self.codec, &payload).map(Some);
            }
            match self.body.next_within(self.patience).await? {
                Some(part) => self.envelopes.push(&part),
                None if self.envelopes.is_empty() => return Ok(None),
                None => return Err(RpcError::invalid("the stream ends within a message")),
            }
        }
    }
}

/// Messages for the client. The stream ends with [`Outgoing::finish`].
pub struct Outgoing {
    codec: Codec,
    parts: tokio::sync::mpsc::Sender<std::io::Result<Bytes>>,
}

/// The client has gone away.
#[derive(Debug)]
pub struct Disconnected;

fn envelope(flags: u8, payload: &[u8]) -> Bytes {
    let mut bytes = Vec::with_capacity(HEADER + payload.len());
    bytes.push(flags);
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes.into()
}

impl Outgoing {
    pub async fn send<T: Message + Serialize>(&self, message: &T) -> Result<(), Disconnected> {
        let part = envelope(0, &encode(self.codec, message));
        self.parts.send(Ok(part)).await.map_err(|_| Disconnected)
    }

    /// Waits until the client has gone away.
    pub async fn closed(&self) {
        self.parts.closed().await;
    }

    /// Ends the stream with its result.
    pub async fn finish(self, result: Result<(), RpcError>) {
        let end = match result {
            Ok(()) => json!({}),
            Err(error) => json!({"error": error.json()}),
        };
        let _ = self
            .parts
            .send(Ok(envelope(END, end.to_string().as_bytes())))
            .await;
    }

    /// Breaks the stream off: the sandbox is gone. The SDKs ask for its health after a broken connection, and then name
    /// the reason; an error envelope would be shown as it is.
    pub async fn break_off(self) {
        let gone = std::io::Error::other("the sandbox does not answer any more");
        let _ = self.parts.send(Err(gone)).await;
    }
}

/// Envelopes that may wait for a slow client.
const WAITING: usize = 64;

/// Answers a stream. `work` gets both directions and runs in a task of its own, also after the client has gone away.
///
/// The answer begins after the first part of the request: some clients take an early answer for the end of the exchange
/// and send no request any more.
pub async fn stream<F>(
    request: Request,
    patience: Duration,
    work: impl FnOnce(Incoming, Outgoing) -> F,
) -> Response
where
    F: Future<Output = ()> + Send + 'static,
{
    let codec = match codec(request.headers()) {
        Ok((codec, true)) => codec,
        Ok((_, false)) => return RpcError::invalid("this call is a stream").into_response(),
        Err(response) => return *response,
    };
    let (parts, receiver) = tokio::sync::mpsc::channel(WAITING);
    let mut incoming = Incoming {
        codec,
        body: Chunks::of(request.into_body()),
        envelopes: Envelopes::default(),
        patience,
    };
    match incoming.body.next_within(patience).await {
        Ok(Some(part)) => incoming.envelopes.push(&part),
        Ok(None) => {}
        Err(failure) => return RpcError::from(failure).into_response(),
    }
    tokio::spawn(work(incoming, Outgoing { codec, parts }));
    let parts = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let mut response = Body::from_stream(parts).into_response();
    let kind = match codec {
        Codec::Json => "application/connect+json",
        Codec::Proto => "application/connect+proto",
    };
    let value = HeaderValue::from_static(kind);
    response.headers_mut().insert(header::CONTENT_TYPE, value);
    response
}

/// A positive number in a header.
pub fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    let value = headers.get(name)?.to_str().ok()?;
    value.parse().ok().filter(|number| *number > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::e2b::envd::messages::{Empty, StartRequest};

    #[test]
    fn envelopes_come_whole_however_the_body_is_cut() {
        let mut bytes = envelope(0, b"one").to_vec();
        bytes.extend_from_slice(&envelope(0, b""));
        bytes.extend_from_slice(&envelope(0, b"three"));
        for size in 1..=bytes.len() {
            let mut envelopes = Envelopes::default();
            let mut found = Vec::new();
            for part in bytes.chunks(size) {
                envelopes.push(part);
                while let Some(payload) = envelopes.next_message().unwrap() {
                    found.push(payload);
                }
            }
            assert_eq!(found, [&b"one"[..], b"", b"three"]);
            assert!(envelopes.is_empty());
        }
    }

    #[test]
    fn long_compressed_and_odd_envelopes_are_refused() {
        for (head, code) in [
            ([0, 0xff, 0xff, 0xff, 0xff], Code::ResourceExhausted),
            ([1, 0, 0, 0, 1], Code::Unimplemented),
            ([4, 0, 0, 0, 1], Code::InvalidArgument),
        ] {
            let mut envelopes = Envelopes::default();
            envelopes.push(&head);
            assert_eq!(envelopes.next_message().unwrap_err().code, code);
        }
    }

    #[test]
    fn messages_are_read_in_both_codecs_or_refused() {
        assert_eq!(decode::<Empty>(Codec::Json, b"").unwrap(), Empty {});
        assert_eq!(decode::<Empty>(Codec::Proto, b"").unwrap(), Empty {});
        assert!(decode::<StartRequest>(Codec::Json, b"[1").is_err());
        assert!(decode::<StartRequest>(Codec::Proto, &[0x0a, 0xff]).is_err());
    }

    #[test]
    fn every_failure_has_a_status() {
        for code in [Code::NotFound, Code::Canceled, Code::Internal] {
            let response = RpcError::new(code, "x").into_response();
            assert_eq!(response.status(), code.status());
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(parts: Vec<Vec<u8>>) {
            let mut envelopes = Envelopes::default();
            for part in &parts {
                envelopes.push(part);
                while let Ok(Some(payload)) = envelopes.next_message() {
                    let _ = decode::<StartRequest>(Codec::Json, &payload);
                    let _ = decode::<StartRequest>(Codec::Proto, &payload);
                }
            }
        }
    }
}
