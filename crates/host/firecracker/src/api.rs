//! Firecracker's HTTP API over its Unix socket.
//!
//! One connection per request. Every request has a deadline, and every answer a limit on its head and body: a
//! Firecracker that a guest took over cannot hold or fill this process.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The longest status line and headers of an answer, in bytes.
const MAX_HEAD: usize = 8 * 1024;
/// The longest body of an answer, in bytes.
const MAX_BODY: usize = 64 * 1024;
/// The most headers of an answer.
const MAX_HEADERS: usize = 32;
/// The longest text of a refusal that is passed on, in characters.
const MAX_FAULT: usize = 400;

/// Why a request to Firecracker failed.
#[derive(Debug, Error)]
pub enum ApiError {
    /// The socket is not there or refuses connections.
    #[error("Firecracker does not listen on its API socket")]
    Connect(#[source] io::Error),
    /// No complete answer arrived in time.
    #[error("Firecracker did not answer {request} within {} s", within.as_secs())]
    TimedOut { request: String, within: Duration },
    /// The connection ended before the answer did.
    #[error("Firecracker closed the connection before it answered {request}")]
    Closed { request: String },
    /// The socket failed.
    #[error("the API socket of Firecracker failed during {request}")]
    Io {
        request: String,
        #[source]
        source: io::Error,
    },
    /// The request has no JSON form.
    #[error("{request} cannot be written as JSON")]
    Encode {
        request: String,
        #[source]
        source: serde_json::Error,
    },
    /// The answer is no HTTP, or longer than an answer can be.
    #[error("Firecracker answered {request} with invalid HTTP: {reason}")]
    Invalid { request: String, reason: String },
    /// Firecracker refused the request.
    #[error("Firecracker refused {request} with status {status}: {message}")]
    Refused {
        request: String,
        status: u16,
        message: String,
    },
}

/// The API of one Firecracker process.
#[derive(Debug, Clone)]
pub struct Api {
    socket: PathBuf,
}

/// The body of a refusal.
#[derive(Debug, Deserialize)]
struct Fault {
    fault_message: String,
}

/// A complete answer.
struct Answer {
    status: u16,
    body: Vec<u8>,
}

/// One request under way.
struct Exchange {
    stream: UnixStream,
    /// Method and path, for messages.
    request: String,
    within: Duration,
    end: Instant,
}

impl Api {
    /// The API behind a socket.
    pub fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
        }
    }

    /// Whether a process listens on the socket.
    pub fn listens(&self) -> bool {
        UnixStream::connect(&self.socket).is_ok()
    }

    /// Creates or replaces a resource.
    pub fn put(&self, path: &str, body: &impl Serialize, within: Duration) -> Result<(), ApiError> {
        self.send("PUT", path, body, within)
    }

    /// Changes a resource.
    pub fn patch(
        &self,
        path: &str,
        body: &impl Serialize,
        within: Duration,
    ) -> Result<(), ApiError> {
        self.send("PATCH", path, body, within)
    }

    fn send(
        &self,
        method: &str,
        path: &str,
        body: &impl Serialize,
        within: Duration,
    ) -> Result<(), ApiError> {
        let request = format!("{method} {path}");
        let body = serde_json::to_vec(body).map_err(|source| ApiError::Encode {
            request: request.clone(),
            source,
        })?;
        let stream = UnixStream::connect(&self.socket).map_err(ApiError::Connect)?;
        let mut exchange = Exchange {
            stream,
            request,
            within,
            end: Instant::now() + within,
        };
        let head = format!(
            "{} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            exchange.request,
            body.len()
        );
        exchange.write(&[head.as_bytes(), &body].concat())?;
        let answer = exchange.read_answer()?;
        match answer.status {
            200..=299 => Ok(()),
            status => Err(ApiError::Refused {
                request: exchange.request,
                status,
                message: fault(&answer.body),
            }),
        }
    }
}

/// The text of a refusal, without control characters and cut to a length that a message can have.
fn fault(body: &[u8]) -> String {
    let text = match serde_json::from_slice::<Fault>(body) {
        Ok(fault) => fault.fault_message,
        Err(_) => String::from_utf8_lossy(body).into_owned(),
    };
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    text.trim().chars().take(MAX_FAULT).map(plain).collect()
}

impl Exchange {
    fn write(&mut self, bytes: &[u8]) -> Result<(), ApiError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let left = self.left()?;
            let written = self
                .stream
                .set_write_timeout(Some(left))
                .and_then(|()| self.stream.write(rest));
            match written {
                Ok(0) => return Err(self.closed()),
                Ok(count) => rest = rest.get(count..).unwrap_or_default(),
                Err(error) => self.failed(error)?,
            }
        }
        Ok(())
    }

    fn read_answer(&mut self) -> Result<Answer, ApiError> {
        let mut bytes = Vec::new();
        loop {
            if let Some((status, head, length)) = self.parse_head(&bytes)? {
                if length > MAX_BODY {
                    return Err(self.invalid(format!("its body has {length} bytes")));
                }
                while bytes.len() < head + length {
                    self.read_more(&mut bytes, head + MAX_BODY)?;
                }
                let body = bytes.get(head..head + length).unwrap_or_default().to_vec();
                return Ok(Answer { status, body });
            }
            self.read_more(&mut bytes, MAX_HEAD)?;
        }
    }

    /// Status, length of the head and length of the body, once the head is complete.
    fn parse_head(&self, bytes: &[u8]) -> Result<Option<(u16, usize, usize)>, ApiError> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut response = httparse::Response::new(&mut headers);
        let parsed = response
            .parse(bytes)
            .map_err(|error| self.invalid(error.to_string()))?;
        let httparse::Status::Complete(head) = parsed else {
            return Ok(None);
        };
        let mut length = 0;
        for header in response.headers.iter() {
            if header.name.eq_ignore_ascii_case("transfer-encoding") {
                return Err(self.invalid("its body has no length".to_owned()));
            }
            if header.name.eq_ignore_ascii_case("content-length") {
                length = std::str::from_utf8(header.value)
                    .ok()
                    .and_then(|text| text.trim().parse().ok())
                    .ok_or_else(|| self.invalid("its length is no number".to_owned()))?;
            }
        }
        Ok(Some((response.code.unwrap_or(0), head, length)))
    }

    /// Reads once. More than `most` bytes in all are an error.
    fn read_more(&mut self, bytes: &mut Vec<u8>, most: usize) -> Result<(), ApiError> {
        if bytes.len() >= most {
            return Err(self.invalid(format!("it is longer than {most} bytes")));
        }
        let mut piece = vec![0; (most - bytes.len()).min(4096)];
        let left = self.left()?;
        let read = self
            .stream
            .set_read_timeout(Some(left))
            .and_then(|()| self.stream.read(&mut piece));
        match read {
            Ok(0) => Err(self.closed()),
            Ok(count) => {
                bytes.extend_from_slice(piece.get(..count).unwrap_or_default());
                Ok(())
            }
            Err(error) => self.failed(error),
        }
    }

    /// The time until the deadline.
    fn left(&self) -> Result<Duration, ApiError> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ApiError::TimedOut {
                request: self.request.clone(),
                within: self.within,
            });
        }
        Ok(left)
    }

    /// A call that was interrupted or waited too long is repeated: the deadline is looked at before each.
    fn failed(&self, error: io::Error) -> Result<(), ApiError> {
        match error.kind() {
            io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                Ok(())
            }
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Err(self.closed()),
            _ => Err(ApiError::Io {
                request: self.request.clone(),
                source: error,
            }),
        }
    }

    fn closed(&self) -> ApiError {
        ApiError::Closed {
            request: self.request.clone(),
        }
    }

    fn invalid(&self, reason: String) -> ApiError {
        ApiError::Invalid {
            request: self.request.clone(),
            reason,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    const SHORT: Duration = Duration::from_millis(300);

    /// Sends one request to a server that reads it and does what `serve` does.
    fn ask(serve: impl FnOnce(UnixStream) + Send + 'static) -> Result<(), ApiError> {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("api.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            let count = stream.read(&mut request).unwrap();
            let text = String::from_utf8_lossy(&request[..count]).into_owned();
            assert!(text.starts_with("PUT /actions HTTP/1.1\r\n"), "{text}");
            assert!(text.ends_with("\r\n\r\n{\"a\":1}"), "{text}");
            serve(stream);
        });
        let answer = Api::new(&socket).put("/actions", &serde_json::json!({"a": 1}), SHORT);
        server.join().unwrap();
        answer
    }

    fn answered(text: &'static str) -> Result<(), ApiError> {
        ask(move |mut stream| stream.write_all(text.as_bytes()).unwrap())
    }

    #[test]
    fn an_empty_answer_is_success_and_a_fault_is_passed_on() {
        answered("HTTP/1.1 204 \r\nServer: x\r\n\r\n").unwrap();
        let fault = "HTTP/1.1 400 \r\nContent-Length: 28\r\n\r\n{\"fault_message\": \"no\\nway\"}";
        let error = answered(fault).unwrap_err().to_string();
        assert_eq!(
            error,
            "Firecracker refused PUT /actions with status 400: no way"
        );
    }

    #[test]
    fn an_invalid_answer_is_an_error_and_no_answer_has_an_end() {
        let invalid = |text| matches!(answered(text), Err(ApiError::Invalid { .. }));
        assert!(invalid("garbage\r\n\r\n"));
        assert!(invalid("HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"));
        assert!(invalid(
            "HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n"
        ));
        assert!(invalid(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        ));
        assert!(matches!(answered(""), Err(ApiError::Closed { .. })));
        let cut_off = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf";
        assert!(matches!(answered(cut_off), Err(ApiError::Closed { .. })));
        let silent = ask(|stream| {
            let _ = (&stream).read(&mut [0; 1]);
        });
        assert!(matches!(silent, Err(ApiError::TimedOut { .. })));
    }

    #[test]
    fn an_endless_answer_ends_at_the_limit_or_the_deadline() {
        let endless = |piece: &'static [u8], pause: Duration| {
            ask(move |mut stream| {
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n");
                while stream.write_all(piece).is_ok() {
                    std::thread::sleep(pause);
                }
            })
        };
        let headers = endless(b"X-Y: z\r\n", Duration::ZERO);
        assert!(matches!(headers, Err(ApiError::Invalid { .. })));
        let drops = endless(b"X", Duration::from_millis(20));
        assert!(matches!(drops, Err(ApiError::TimedOut { .. })));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_an_answer_or_an_error(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300)) {
            let (stream, _other) = UnixStream::pair().unwrap();
            let exchange = Exchange {
                stream,
                request: "GET /".to_owned(),
                within: SHORT,
                end: Instant::now() + SHORT,
            };
            let _ = exchange.parse_head(&bytes);
            let _ = fault(&bytes);
        }
    }
}
