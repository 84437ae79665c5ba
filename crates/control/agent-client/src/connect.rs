//! Opens a connection to an agent.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forkd_guest_proto::{
    Decoder, Frame, Hello, Kind, PROTOCOL_VERSION, Request, feature, frame, window,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use crate::connection::{self, Connection, Terms};
use crate::error::ConnectError;
use crate::stream::{self, FIRST, State, Stream};
use crate::{Budget, Client};

/// The longest answer of a vsock device.
const MAX_LINE: usize = 64;

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
        let greeting = Greeting::default();
        let (client, _) = Self::open(io, options, greeting).await?;
        Ok(client)
    }

    /// Connects through the Unix socket of a VMM's vsock device to a port inside the guest.
    pub async fn connect_vsock(
        path: &Path,
        port: u32,
        options: Options,
    ) -> Result<Self, ConnectError> {
        let stream = dial_vsock(path, port, options.timeout).await?;
        Self::connect_through(stream, port, options).await
    }

    /// As [`Self::connect_vsock`], on a socket that is connected already.
    pub async fn connect_through<T>(
        io: T,
        port: u32,
        options: Options,
    ) -> Result<Self, ConnectError>
    where
        T: AsyncRead + AsyncWrite + Send + 'static,
    {
        let greeting = Greeting {
            port: Some(port),
            request: None,
        };
        let (client, _) = Self::open(io, options, greeting).await?;
        Ok(client)
    }

    /// As [`Self::connect_vsock`], with a first request in the same write as the hello.
    pub(crate) async fn connect_vsock_asking(
        path: &Path,
        port: u32,
        options: Options,
        request: &Request,
    ) -> Result<(Self, Stream), ConnectError> {
        let io = dial_vsock(path, port, options.timeout).await?;
        let request = stream::payload(request).map_err(|error| ConnectError::NoHello {
            reason: error.to_string(),
        })?;
        let greeting = Greeting {
            port: Some(port),
            request: Some(request),
        };
        let (client, state) = Self::open(io, options, greeting).await?;
        let asked = Stream::first(&client.connection, state);
        Ok((client, asked))
    }

    /// Greets the agent. The state is that of the greeting's request.
    async fn open<T>(
        io: T,
        options: Options,
        greeting: Greeting,
    ) -> Result<(Self, Arc<State>), ConnectError>
    where
        T: AsyncRead + AsyncWrite + Send + 'static,
    {
        let (mut reader, mut writer) = tokio::io::split(io);
        let mut decoder = Decoder::new();
        let mut rest = Vec::new();
        let timeout = options.timeout;
        let greeted = greet(
            &mut reader,
            &mut writer,
            &mut decoder,
            &mut rest,
            &options,
            &greeting,
        );
        let peer =
            tokio::time::timeout(timeout, greeted)
                .await
                .map_err(|_| ConnectError::NoHello {
                    reason: format!("nothing came within {timeout:?}"),
                })??;
        let state = Arc::new(State::new(peer.window, options.window));
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
            greeting.request.is_some().then(|| Arc::clone(&state)),
        );
        Ok((Self { connection }, state))
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

async fn dial_vsock(path: &Path, port: u32, time: Duration) -> Result<UnixStream, ConnectError> {
    reach(UnixStream::connect(path), time)
        .await
        .map_err(|source| ConnectError::Socket {
            target: format!("vsock port {port} through {}", path.display()),
            source,
        })
}

/// The parts of the first write beside the hello.
#[derive(Default)]
struct Greeting {
    /// The port that a VMM's vsock device is asked for.
    port: Option<u32>,
    /// A request, as bytes.
    request: Option<Vec<u8>>,
}

async fn greet(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    decoder: &mut Decoder,
    rest: &mut Vec<u8>,
    options: &Options,
    greeting: &Greeting,
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
    let mut bytes = match greeting.port {
        Some(port) => format!("CONNECT {port}\n").into_bytes(),
        None => Vec::new(),
    };
    frame::encode_into(&mut bytes, 0, Kind::Hello, 0, &payload);
    if let Some(request) = &greeting.request {
        frame::encode_into(&mut bytes, FIRST, Kind::Request, 0, request);
    }
    // A device that refuses the port closes its end; the reason is in its answer.
    let sent = writer.write_all(&bytes).await;
    if let Some(port) = greeting.port {
        first_line(reader, rest, port).await?;
    }
    sent.map_err(|error| failed("sending ours", &error))?;
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

/// Reads the line with which a vsock device answers. What follows it belongs to the agent and goes to `rest`.
async fn first_line(
    reader: &mut (impl AsyncRead + Unpin),
    rest: &mut Vec<u8>,
    port: u32,
) -> Result<(), ConnectError> {
    let failed = |source| ConnectError::Socket {
        target: format!("vsock port {port}"),
        source,
    };
    let refused = |answer: &[u8]| ConnectError::Refused {
        port,
        answer: String::from_utf8_lossy(answer).trim().to_owned(),
    };
    let mut answer = Vec::new();
    let end = loop {
        if let Some(end) = answer.iter().position(|byte| *byte == b'\n') {
            break end;
        }
        if answer.len() >= MAX_LINE {
            return Err(refused(answer.get(..MAX_LINE).unwrap_or_default()));
        }
        if reader.read_buf(&mut answer).await.map_err(failed)? == 0 {
            return Err(failed(std::io::ErrorKind::UnexpectedEof.into()));
        }
    };
    let (line, left) = answer.split_at(end);
    if line.len() > MAX_LINE || !line.starts_with(b"OK") {
        return Err(refused(line.get(..MAX_LINE).unwrap_or(line)));
    }
    rest.extend(left.iter().skip(1));
    Ok(())
}

/// Reads the first frame. `rest` holds bytes that came already, and in the end those that follow the frame.
async fn first_frame(
    reader: &mut (impl AsyncRead + Unpin),
    decoder: &mut Decoder,
    rest: &mut Vec<u8>,
) -> Result<Frame, ConnectError> {
    let failed = |reason: String| ConnectError::NoHello { reason };
    let mut buffer = std::mem::take(rest);
    loop {
        let mut bytes = buffer.as_slice();
        if let Some(frame) = decoder
            .next(&mut bytes)
            .map_err(|error| failed(error.to_string()))?
        {
            rest.extend_from_slice(bytes);
            return Ok(frame);
        }
        buffer.resize(connection::READ_BUFFER, 0);
        let count = reader
            .read(&mut buffer)
            .await
            .map_err(|error| failed(error.to_string()))?;
        if count == 0 {
            return Err(failed("it closed the connection".to_owned()));
        }
        buffer.truncate(count);
    }
}
