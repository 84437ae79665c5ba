//! Programs with input, over a WebSocket.

use std::io;

use forkd_api::routes::{self, fill};
use forkd_api::{ErrorBody, ErrorCode, ExecFrame, TerminalInput, TerminalStart};
use futures::{SinkExt, StreamExt};
use http::header::{AUTHORIZATION, HeaderValue};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{self, Message};
use tokio_tungstenite::{WebSocketStream, client_async};

use crate::{Client, Error, Target};

trait Io: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Io for T {}

/// A program that runs with input.
pub struct Terminal {
    socket: WebSocketStream<Box<dyn Io>>,
}

/// What comes back.
#[derive(Debug)]
pub enum TerminalEvent {
    /// Output of the terminal, or stdout.
    Stdout(Vec<u8>),
    /// stderr.
    Stderr(Vec<u8>),
    /// Started, exited, failed.
    Frame(ExecFrame),
}

fn cut_off(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::CutOff(error.into())
}

impl Client {
    /// Runs a program with input. Only `http` and `unix` addresses are served.
    pub async fn terminal(&self, id: &str, start: &TerminalStart) -> Result<Terminal, Error> {
        let unreachable = |source: io::Error| Error::Unreachable {
            target: self.target.to_string(),
            source: Box::new(source),
        };
        let (io, host): (Box<dyn Io>, &str) = match &self.target {
            Target::Unix(path) => (
                Box::new(UnixStream::connect(path).await.map_err(unreachable)?),
                "localhost",
            ),
            Target::Url(url) => {
                let Some(host) = url.strip_prefix("http://") else {
                    let text = "terminals over https are not served by this client";
                    return Err(unreachable(io::Error::new(
                        io::ErrorKind::Unsupported,
                        text,
                    )));
                };
                let address = if host.contains(':') {
                    host.to_owned()
                } else {
                    format!("{host}:80")
                };
                (
                    Box::new(TcpStream::connect(address).await.map_err(unreachable)?),
                    host,
                )
            }
        };
        let url = format!("ws://{host}{}", fill(routes::TERMINAL, &[id]));
        let mut request = url.into_client_request().map_err(cut_off)?;
        if let Some(token) = &self.token
            && let Ok(value) = HeaderValue::from_str(&format!("Bearer {token}"))
        {
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        let socket = match client_async(request, io).await {
            Ok((socket, _)) => socket,
            Err(tungstenite::Error::Http(response)) => return Err(refused(&response)),
            Err(error) => return Err(cut_off(error)),
        };
        let mut terminal = Terminal { socket };
        terminal.text(start).await?;
        Ok(terminal)
    }
}

fn refused(response: &http::Response<Option<Vec<u8>>>) -> Error {
    let status = response.status().as_u16();
    let body = response
        .body()
        .as_deref()
        .and_then(|bytes| serde_json::from_slice(bytes).ok())
        .unwrap_or_else(|| ErrorBody {
            error: format!("HTTP {status}"),
            code: ErrorCode::Internal,
            hint: None,
            request_id: None,
        });
    Error::Refused { status, body }
}

impl Terminal {
    async fn text(&mut self, message: &impl serde::Serialize) -> Result<(), Error> {
        let text = serde_json::to_string(message).map_err(cut_off)?;
        self.socket.send(Message::text(text)).await.map_err(cut_off)
    }

    /// Sends input.
    pub async fn write(&mut self, bytes: Vec<u8>) -> Result<(), Error> {
        self.socket
            .send(Message::binary(bytes))
            .await
            .map_err(cut_off)
    }

    /// Says that the size changed, that there is no more input, or sends a signal.
    pub async fn control(&mut self, input: &TerminalInput) -> Result<(), Error> {
        self.text(input).await
    }

    /// What comes next; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<TerminalEvent>, Error> {
        while let Some(message) = self.socket.next().await {
            match message.map_err(cut_off)? {
                Message::Binary(bytes) => {
                    let (channel, rest) = match bytes.split_first() {
                        Some((channel, rest)) => (*channel, rest.to_vec()),
                        None => continue,
                    };
                    return Ok(Some(match channel {
                        2 => TerminalEvent::Stderr(rest),
                        _ => TerminalEvent::Stdout(rest),
                    }));
                }
                Message::Text(text) => {
                    let frame = serde_json::from_str(&text).map_err(|source| Error::BadAnswer {
                        status: 101,
                        source,
                    })?;
                    return Ok(Some(TerminalEvent::Frame(frame)));
                }
                Message::Close(_) => return Ok(None),
                _ => {}
            }
        }
        Ok(None)
    }
}
