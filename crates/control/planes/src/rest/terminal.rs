//! The WebSocket route that runs a program with input, on a terminal if the client asks for one.
//!
//! The program is killed when the client disconnects. A program that does not read its input does not hold up its
//! output.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::response::Response;
use forkd_agent_client::{Client, Exec, Output};
use forkd_api::{ErrorCode, ExecFrame, TerminalInput, TerminalStart};
use forkd_guest_proto as guest;

use super::owned::OwnedSandbox;
use crate::guest::exec::{environment, exit_code, not_started};
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::extract::Held;
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::error::Error;

/// How long a client may take to say what to run.
const START: Duration = Duration::from_secs(30);
/// How often a client is looked for whose input waits.
const LOOK: Duration = Duration::from_secs(15);
/// The largest message.
const MAX_MESSAGE: usize = 1 << 20;

/// Runs a program with input, on a terminal if one is asked for.
///
/// The client sends a `TerminalStart` as text, then input as binary messages and `TerminalInput` as text. The
/// daemon sends output as binary messages (the first byte is 1 for stdout and the terminal, 2 for stderr)
/// and `ExecFrame`s `started`, `exit` and `error` as text. The program is killed when the client goes away.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/terminal", tag = "guest",
    params(("id" = String, Path, description = "The sandbox")), responses(
    (status = 101, description = "Switched to WebSocket")
))]
pub async fn terminal(
    OwnedSandbox(sandbox): OwnedSandbox,
    held: Held,
    upgrade: Result<WebSocketUpgrade, axum::extract::ws::rejection::WebSocketUpgradeRejection>,
) -> Answer<Response> {
    let upgrade = upgrade.map_err(|error| {
        Failure::new(
            ErrorCode::InvalidRequest,
            format!("this route is a WebSocket: {}", error.body_text()),
        )
    })?;
    let client = sandbox.agent().await?;
    Ok(upgrade
        .max_message_size(MAX_MESSAGE)
        .on_upgrade(async move |socket| {
            // A session counts as a request until it ends.
            let _held = held;
            let env = sandbox.record().environment();
            let mut session = Session {
                socket,
                client,
                env,
            };
            if let Err(error) = session.run().await {
                let frame = ExecFrame::Error {
                    error: error.chain(),
                    code: error.code(),
                };
                let _ = session.say(&frame).await;
            }
            let _ = session.socket.send(Message::Close(None)).await;
        }))
}

struct Session {
    socket: WebSocket,
    client: Client,
    /// The environment of the sandbox.
    env: BTreeMap<String, String>,
}

/// The next item of either direction.
enum Next {
    Output(Option<Output>),
    Input(Option<Message>),
}

impl Session {
    async fn run(&mut self) -> Result<(), Error> {
        let Some(start) = self.start().await? else {
            return Ok(());
        };
        let args = start.args.clone();
        let client = self.client.by(agent_limits::start());
        let mut exec = match client.exec(wish(start, &self.env)).await {
            Ok(exec) => exec,
            Err(error) => return self.not_started(error, &args).await,
        };
        let pid = exec.started().pid;
        self.say(&ExecFrame::Started { pid }).await?;
        loop {
            let next = tokio::select! {
                output = exec.next_output() => Next::Output(output.map_err(Error::agent("the program was lost"))?),
                message = self.socket.recv() => Next::Input(message.and_then(Result::ok)),
            };
            match next {
                Next::Output(Some(output)) => self.output(output).await?,
                Next::Output(None) => break,
                Next::Input(Some(Message::Binary(bytes))) => self.feed(&mut exec, &bytes).await?,
                Next::Input(Some(Message::Text(text))) => input(&exec, &text)?,
                Next::Input(Some(Message::Ping(_) | Message::Pong(_))) => {}
                // The client went away: dropping the program kills it.
                Next::Input(Some(Message::Close(_)) | None) => return Ok(()),
            }
        }
        let result = exec
            .wait()
            .await
            .map_err(Error::agent("the program was lost"))?;
        let exit_code = exit_code(result.status);
        self.say(&ExecFrame::Exit {
            exit_code,
            timed_out: result.timed_out,
        })
        .await
    }

    /// Hands input over. A program that does not read it is no reason to stop showing what it prints, nor to miss that
    /// the client is gone: the socket is not read meanwhile, so it is written to.
    async fn feed(&mut self, exec: &mut Exec, bytes: &[u8]) -> Result<(), Error> {
        let stdin = exec.stdin();
        let write = stdin.write(bytes);
        tokio::pin!(write);
        let mut look = tokio::time::interval(LOOK);
        look.reset();
        loop {
            tokio::select! {
                done = &mut write => {
                    // The write fails if the program has ended: ignore that, the end of the program arrives next.
                    let _ = done;
                    return Ok(());
                }
                output = exec.next_output() => match output.map_err(Error::agent("the program was lost"))? {
                    Some(output) => self.output(output).await?,
                    None => return Ok(()),
                },
                _ = look.tick() => self
                    .socket
                    .send(Message::Ping(bytes::Bytes::new()))
                    .await
                    .map_err(|_| Error::Task)?,
            }
        }
    }

    async fn not_started(
        &mut self,
        error: forkd_agent_client::Error,
        args: &[String],
    ) -> Result<(), Error> {
        let (exit_code, why) = not_started(error, args)?;
        self.output(Output::Stderr(why.into_bytes())).await?;
        self.say(&ExecFrame::Exit {
            exit_code,
            timed_out: false,
        })
        .await
    }

    async fn start(&mut self) -> Result<Option<TerminalStart>, Error> {
        let first = tokio::time::timeout(START, self.socket.recv())
            .await
            .map_err(|_| Error::Timeout {
                what: "the first message".into(),
                seconds: START.as_secs(),
            })?;
        match first {
            Some(Ok(Message::Text(text))) => {
                serde_json::from_str(&text).map(Some).map_err(|error| {
                    Error::refused(
                        ErrorCode::InvalidRequest,
                        format!("the first message is not a TerminalStart: {error}"),
                    )
                })
            }
            Some(Ok(Message::Close(_)) | Err(_)) | None => Ok(None),
            Some(Ok(_)) => Err(Error::refused(
                ErrorCode::InvalidRequest,
                "the first message must be a TerminalStart as text",
            )),
        }
    }

    async fn output(&mut self, output: Output) -> Result<(), Error> {
        send_output(&mut self.socket, output).await
    }

    async fn say(&mut self, frame: &ExecFrame) -> Result<(), Error> {
        let text = serde_json::to_string(frame).unwrap_or_default();
        self.socket
            .send(Message::Text(text.into()))
            .await
            .map_err(|_| Error::Task)
    }
}

async fn send_output(socket: &mut WebSocket, output: Output) -> Result<(), Error> {
    let (channel, bytes) = match output {
        Output::Stdout(bytes) => (1, bytes),
        Output::Stderr(bytes) => (2, bytes),
        Output::Lost { .. } => return Ok(()),
    };
    let mut message = Vec::with_capacity(bytes.len() + 1);
    message.push(channel);
    message.extend_from_slice(&bytes);
    socket
        .send(Message::Binary(message.into()))
        .await
        .map_err(|_| Error::Task)
}

fn input(exec: &Exec, text: &str) -> Result<(), Error> {
    let message: TerminalInput = serde_json::from_str(text).map_err(|error| {
        Error::refused(
            ErrorCode::InvalidRequest,
            format!("not a TerminalInput: {error}"),
        )
    })?;
    match message {
        TerminalInput::Resize { rows, cols } => exec.resize(rows, cols),
        TerminalInput::Eof => exec.stdin().close(),
        TerminalInput::Signal { signal } => exec.signal(i32::from(signal)),
    }
    Ok(())
}

fn wish(start: TerminalStart, of_sandbox: &BTreeMap<String, String>) -> guest::ExecRequest {
    let pty = match (start.rows, start.cols) {
        (None, None) => None,
        (rows, cols) => Some(guest::PtySize {
            rows: rows.unwrap_or(24),
            cols: cols.unwrap_or(80),
        }),
    };
    let shell = "if command -v bash >/dev/null; then exec bash -l; else exec sh -l; fi";
    guest::ExecRequest {
        shell: start.args.is_empty().then(|| shell.to_owned()),
        argv: start.args,
        env: environment(of_sandbox, &start.env),
        cwd: start.cwd,
        user: start.user,
        stdin: true,
        pty,
        on_disconnect: guest::OnDisconnect::Kill,
        ..guest::ExecRequest::default()
    }
}
