//! The messages between the agent and a runner: a length in four bytes, then JSON.

use std::io;
use std::os::fd::OwnedFd;

use forkd_guest_proto::{EvalError, JsonText};
use serde::{Deserialize, Serialize};
use tokio::io::unix::AsyncFd;

use crate::process::pump;

/// The longest message of a runner.
const MAX_MESSAGE: usize = 32 * 1024 * 1024;

/// A message to a runner.
#[derive(Debug, Serialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Ask<'a> {
    /// Import and run before anything else.
    Warmup {
        id: u64,
        imports: &'a [String],
        code: &'a str,
    },
    /// Run a piece of code.
    Run {
        id: u64,
        mode: forkd_guest_proto::EvalMode,
        code: &'a str,
    },
    /// End a call with what the language makes of an interrupt, also when it has not begun yet.
    Interrupt { id: u64, call: u64 },
    /// Mix this into every generator of random numbers.
    Reseed { id: u64, entropy: &'a str },
    /// Make the heap small.
    Collect { id: u64 },
}

/// A message of a runner.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Answer {
    /// Which ask it answers; 0 for the hello.
    pub id: u64,
    pub version: String,
    pub repr: Option<String>,
    #[serde(deserialize_with = "present")]
    pub json: Option<JsonText>,
    pub display: Option<JsonText>,
    pub error: Option<EvalError>,
    pub count: u64,
    /// Whether code of the user can run before the next call; a runner that does not know says nothing.
    pub alone: Option<bool>,
}

/// A `null` that is there is a value.
fn present<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<JsonText>, D::Error> {
    JsonText::deserialize(deserializer).map(Some)
}

/// Sends one message.
pub async fn send(socket: &AsyncFd<OwnedFd>, ask: &Ask<'_>) -> io::Result<()> {
    let body = serde_json::to_vec(ask)?;
    let length = u32::try_from(body.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut message = length.to_le_bytes().to_vec();
    message.extend_from_slice(&body);
    pump::write_all(socket, &message).await
}

/// Receives one message; `None` at the end.
pub async fn receive(socket: &AsyncFd<OwnedFd>) -> io::Result<Option<Answer>> {
    let Some(header) = exactly(socket, 4).await? else {
        return Ok(None);
    };
    let length = header
        .try_into()
        .map(u32::from_le_bytes)
        .unwrap_or(u32::MAX);
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    if length > MAX_MESSAGE {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a message of the runner is too long",
        ));
    }
    let Some(body) = exactly(socket, length).await? else {
        return Ok(None);
    };
    Ok(Some(serde_json::from_slice(&body)?))
}

async fn exactly(socket: &AsyncFd<OwnedFd>, count: usize) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    while bytes.len() < count {
        let part = pump::read(socket, (count - bytes.len()).min(64 * 1024)).await?;
        if part.is_empty() {
            return Ok(None);
        }
        bytes.extend_from_slice(&part);
    }
    Ok(Some(bytes))
}
