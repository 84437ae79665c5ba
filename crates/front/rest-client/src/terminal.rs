//! Programs with input, over a WebSocket.
//!
//! Output arrives as binary messages whose first byte is the stream: 1 stdout or terminal, 2 stderr. Everything else is JSON
//! in text messages.

use forkd_api::routes::{self, fill};
use forkd_api::{ExecFrame, TerminalInput, TerminalStart};
use futures::{SinkExt, StreamExt};
use http::StatusCode;
use http::header::{
    CONNECTION, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION,
    UPGRADE,
};
use reqwest::Upgraded;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::Role;

use crate::{Client, Error};

/// The connection to a program that gets input.
pub struct Terminal {
    socket: WebSocketStream<Upgraded>,
}

/// A message from the program.
#[derive(Debug)]
pub enum TerminalEvent {
    /// Output on the terminal or on stdout.
    Stdout(Vec<u8>),
    /// Output on stderr.
    Stderr(Vec<u8>),
    /// The program started, exited or failed.
    Frame(ExecFrame),
}

fn cut_off(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::CutOff(error.into())
}

impl Client {
    /// Starts a program with input.
    pub async fn terminal(&self, id: &str, start: &TerminalStart) -> Result<Terminal, Error> {
        let key = generate_key();
        let request = self
            .upgrade(&fill(routes::TERMINAL, &[id]))
            .header(CONNECTION, "Upgrade")
            .header(UPGRADE, "websocket")
            .header(SEC_WEBSOCKET_VERSION, "13")
            .header(SEC_WEBSOCKET_KEY, &key);
        let response = self.send(request).await?;
        let accepted = response
            .headers()
            .get(SEC_WEBSOCKET_ACCEPT)
            .map(HeaderValue::as_bytes);
        if response.status() != StatusCode::SWITCHING_PROTOCOLS
            || accepted != Some(derive_accept_key(key.as_bytes()).as_bytes())
        {
            return Err(cut_off("the server does not speak the WebSocket protocol"));
        }
        let connection = response.upgrade().await.map_err(cut_off)?;
        let socket = WebSocketStream::from_raw_socket(connection, Role::Client, None).await;
        let mut terminal = Terminal { socket };
        terminal.text(start).await?;
        Ok(terminal)
    }
}

impl Terminal {
    async fn text(&mut self, message: &impl serde::Serialize) -> Result<(), Error> {
        let text = serde_json::to_string(message).map_err(cut_off)?;
        self.socket.send(Message::text(text)).await.map_err(cut_off)
    }

    /// Sends bytes to standard input.
    pub async fn write(&mut self, bytes: Vec<u8>) -> Result<(), Error> {
        self.socket
            .send(Message::binary(bytes))
            .await
            .map_err(cut_off)
    }

    /// Sends a new terminal size, end of input, or a signal.
    pub async fn control(&mut self, input: &TerminalInput) -> Result<(), Error> {
        self.text(input).await
    }

    /// The next message; `None` when the daemon has closed the connection.
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
