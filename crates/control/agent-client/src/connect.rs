//! Opens a connection to an agent.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forkd_guest_proto::{Decoder, Frame, Hello, Kind, PROTOCOL_VERSION, feature, frame, window};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use crate::connection::{self, Connection, Terms};
use crate::error::ConnectError;
use crate::{Budget, Client};

/// How to connect.
#[derive(Debug, Clone)]
pub struct Options {
    /// The secret of an agent that listens on TCP.
    pub token: Option<String>,
    /// How many bytes to hold per channel of each request.
    pub window: u32,
    /// How long connecting may take, up to the agent's hello.
    pub timeout: Duration,
    /// Who we are, for people.
    pub program: String,
    /// The memory that answers may take, together with those of other connections.
    pub budget: Budget,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            token: None,
            window: window::DEFAULT,
            timeout: Duration::from_secs(10),
            program: concat!("forkd-agent-client ", env!("CARGO_PKG_VERSION")).to_owned(),
            budget: Budget::unlimited(),
        }
    }
}

impl Client {
    /// Says hello on a byte stream. Must be called within a tokio runtime, whose tasks then serve the
    /// connection.
    pub async fn connect<T>(io: T, options: Options) -> Result<Self, ConnectError>
    where
        T: AsyncRead + AsyncWrite + Send + 'static,
    {
        let (mut reader, mut writer) = tokio::io::split(io);
        let mut decoder = Decoder::new();
        let mut rest = Vec::new();
        let timeout = options.timeout;
        let greeting = greet(&mut reader, &mut writer, &mut decoder, &mut rest, &options);
        let peer = tokio::time::timeout(timeout, greeting)
            .await
            .map_err(|_| ConnectError::NoHello {
                reason: format!("nothing came within {timeout:?}"),
            })??;
        let connection = Connection::start(
            Terms {
                peer,
                window: options.window,
                budget: options.budget,
            },
            reader,
            writer,
            decoder,
            rest,
        );
        Ok(Self {
            connection: Arc::clone(&connection),
        })
    }

    /// Connects through the Unix socket of a VMM's vsock device to a port inside the guest.
    pub async fn connect_vsock(
        path: &Path,
        port: u32,
        options: Options,
    ) -> Result<Self, ConnectError> {
        let target = || format!("vsock port {port} through {}", path.display());
        let failed = |source| ConnectError::Socket {
            target: target(),
            source,
        };
        let stream = reach(UnixStream::connect(path), options.timeout)
            .await
            .map_err(failed)?;
        Self::connect_through(stream, port, options).await
    }

    /// As [`Self::connect_vsock`], on a socket that is connected already.
    pub async fn connect_through<T>(
        mut io: T,
        port: u32,
        options: Options,
    ) -> Result<Self, ConnectError>
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let failed = |source| ConnectError::Socket {
            target: format!("vsock port {port}"),
            source,
        };
        let asking = async {
            io.write_all(format!("CONNECT {port}\n").as_bytes()).await?;
            let mut answer = Vec::new();
            // Byte by byte: what follows the line belongs to the agent.
            while answer.len() < 64 && answer.last() != Some(&b'\n') {
                answer.push(io.read_u8().await?);
            }
            Ok(answer)
        };
        let answer: Vec<u8> = reach(asking, options.timeout).await.map_err(failed)?;
        if !answer.starts_with(b"OK") {
            let answer = String::from_utf8_lossy(&answer).trim().to_owned();
            return Err(ConnectError::Refused { port, answer });
        }
        Self::connect(io, options).await
    }

    /// Connects to an agent that listens on TCP.
    pub async fn connect_tcp(address: &str, options: Options) -> Result<Self, ConnectError> {
        let failed = |source| ConnectError::Socket {
            target: address.to_owned(),
            source,
        };
        let stream = reach(TcpStream::connect(address), options.timeout)
            .await
            .map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        Self::connect(stream, options).await
    }

    /// Connects to an agent that listens on a Unix socket.
    pub async fn connect_unix(path: &Path, options: Options) -> Result<Self, ConnectError> {
        let failed = |source| ConnectError::Socket {
            target: path.display().to_string(),
            source,
        };
        let stream = reach(UnixStream::connect(path), options.timeout)
            .await
            .map_err(failed)?;
        Self::connect(stream, options).await
    }
}

async fn reach<T>(
    work: impl Future<Output = std::io::Result<T>>,
    time: Duration,
) -> std::io::Result<T> {
    tokio::time::timeout(time, work)
        .await
        .unwrap_or(Err(std::io::ErrorKind::TimedOut.into()))
}

async fn greet(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    decoder: &mut Decoder,
    rest: &mut Vec<u8>,
    options: &Options,
) -> Result<Hello, ConnectError> {
    let failed = |what: &str, error: &dyn std::fmt::Display| ConnectError::NoHello {
        reason: format!("{what}: {error}"),
    };
    let own = Hello {
        version: PROTOCOL_VERSION,
        features: feature::ALL.iter().map(ToString::to_string).collect(),
        window: options.window,
        program: options.program.clone(),
        token: options.token.clone(),
    };
    let payload = serde_json::to_vec(&own).map_err(|error| failed("our own", &error))?;
    let bytes = frame::encode(0, Kind::Hello, 0, &payload);
    writer
        .write_all(&bytes)
        .await
        .map_err(|error| failed("sending ours", &error))?;
    let frame = first_frame(reader, decoder, rest).await?;
    if frame.kind != Kind::Hello {
        return Err(ConnectError::NoHello {
            reason: "it said something else".to_owned(),
        });
    }
    let hello: Hello =
        serde_json::from_slice(&frame.payload).map_err(|error| failed("reading it", &error))?;
    if hello.version != PROTOCOL_VERSION {
        return Err(ConnectError::Version {
            theirs: hello.version,
            ours: PROTOCOL_VERSION,
        });
    }
    Ok(hello)
}

async fn first_frame(
    reader: &mut (impl AsyncRead + Unpin),
    decoder: &mut Decoder,
    rest: &mut Vec<u8>,
) -> Result<Frame, ConnectError> {
    let failed = |reason: String| ConnectError::NoHello { reason };
    let mut buffer = vec![0; connection::READ_BUFFER];
    loop {
        let count = reader
            .read(&mut buffer)
            .await
            .map_err(|error| failed(error.to_string()))?;
        if count == 0 {
            return Err(failed("it closed the connection".to_owned()));
        }
        let mut bytes = buffer.get(..count).unwrap_or_default();
        if let Some(frame) = decoder
            .next(&mut bytes)
            .map_err(|error| failed(error.to_string()))?
        {
            rest.extend_from_slice(bytes);
            return Ok(frame);
        }
    }
}
