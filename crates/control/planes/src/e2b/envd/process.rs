//! The service `process.Process`: start, follow, feed and signal processes.
//!
//! A process goes on when its client goes away. The task of a start therefore reads the output to its end, so that the
//! process does not stand still, and throws it away when there is no client for it.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use forkd_agent_client::{Client, Exec, Output};
use forkd_guest_proto as guest;
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::sandbox::SandboxHandle;
use tokio::time::{Instant, sleep_until};

use super::connect::{self, Code, Disconnected, Incoming, Outgoing, RpcError, number};
use super::messages::{
    DataEvent, Empty, EndEvent, Event, EventResponse, InputBytes, ListResponse, OutputBytes,
    ProcessConfig, ProcessInfo, ProcessInput, ProcessRequest, ProcessSelector, Selector,
    SendInputRequest, SendSignalRequest, Signal, Size, StartEvent, StartRequest, StreamInput,
    StreamInputRequest, UpdateRequest,
};
use super::paths;
use super::users;
use crate::e2b::state::{E2b, labels};
use crate::e2b::target::Reached;
use crate::guest::exec::{self, Program};
use crate::guest::process;

/// Seconds of silence after which a stream says that it lives, unless the client names another number.
const KEEPALIVE: u64 = 90;
/// How long a stream of input may be silent. The SDKs send a sign of life every 50 seconds.
const INPUT_PATIENCE: Duration = Duration::from_secs(300);
/// How long the one message of a server stream may take to arrive.
const REQUEST_PATIENCE: Duration = Duration::from_secs(30);
/// The longest time that a client may give a process.
const MAX_TIMEOUT_MS: u64 = 7 * 24 * 3600 * 1000;

/// One call, by its method.
pub async fn call(
    State(e2b): State<Arc<E2b>>,
    Path(method): Path<String>,
    reached: Reached,
    request: Request,
) -> Response {
    let sandbox = reached.sandbox;
    match method.as_str() {
        "List" => connect::unary(request, |_: Empty| list(&sandbox)).await,
        "SendInput" => connect::unary(request, |input| send_input(&sandbox, input)).await,
        "SendSignal" => connect::unary(request, |signal| send_signal(&sandbox, signal)).await,
        "CloseStdin" => connect::unary(request, |which| close_stdin(&sandbox, which)).await,
        "Update" => connect::unary(request, |update| resize(&sandbox, update)).await,
        "Start" => {
            let call = Call::of(&request, e2b, sandbox);
            connect::stream(request, REQUEST_PATIENCE, |incoming, outgoing| {
                call.start(incoming, outgoing)
            })
            .await
        }
        "Connect" => {
            let call = Call::of(&request, e2b, sandbox);
            connect::stream(request, REQUEST_PATIENCE, |incoming, outgoing| {
                call.follow(incoming, outgoing)
            })
            .await
        }
        "StreamInput" => {
            connect::stream(request, INPUT_PATIENCE, |incoming, outgoing| {
                stream_input(sandbox, incoming, outgoing)
            })
            .await
        }
        _ => no_method(&method).into_response(),
    }
}

/// The error of a method that a service does not have.
pub fn no_method(method: &str) -> RpcError {
    let method: String = method.chars().take(60).collect();
    RpcError::new(Code::Unimplemented, format!("there is no method {method}"))
}

/// A streaming call and what its headers say.
struct Call {
    e2b: Arc<E2b>,
    sandbox: Arc<SandboxHandle>,
    user: Option<String>,
    timeout_ms: Option<u64>,
    keepalive: Duration,
}

impl Call {
    fn of(request: &Request, e2b: Arc<E2b>, sandbox: Arc<SandboxHandle>) -> Self {
        let headers = request.headers();
        let timeout = number(headers, "connect-timeout-ms");
        let keepalive = number(headers, "keepalive-ping-interval").unwrap_or(KEEPALIVE);
        Self {
            e2b,
            sandbox,
            user: users::named(headers),
            timeout_ms: timeout.map(|ms| ms.min(MAX_TIMEOUT_MS)),
            keepalive: Duration::from_secs(keepalive.min(3600)),
        }
    }

    async fn start(self, mut incoming: Incoming, outgoing: Outgoing) {
        let started = async {
            let request = incoming.next::<StartRequest>().await?;
            let request = request.ok_or_else(|| RpcError::invalid("the request is missing"))?;
            let client = self.sandbox.agent().await?;
            let wish = self.wish(&client, request).await?;
            let pty = wish.pty.is_some();
            let exec = client
                .by(agent_limits::start())
                .exec(wish)
                .await
                .map_err(not_started)?;
            Ok::<_, RpcError>((exec, pty))
        };
        match started.await {
            Ok((exec, pty)) => self.pump(exec, pty, true, outgoing).await,
            Err(error) => outgoing.finish(Err(error)).await,
        }
    }

    /// The process as the agent takes it.
    async fn wish(
        &self,
        client: &Client,
        request: StartRequest,
    ) -> Result<guest::ExecRequest, RpcError> {
        let config = request.process.unwrap_or_default();
        let state = self.e2b.of(&self.sandbox.id);
        let user = state
            .users
            .find(client, self.user.as_deref())
            .await
            .map_err(|error| RpcError::new(Code::Unauthenticated, error.to_string()))?;
        let cwd = paths::resolve(config.cwd.as_deref().unwrap_or_default(), &user)
            .ok_or_else(|| RpcError::invalid("the working directory is not a path"))?;
        let mut args = vec![config.cmd];
        args.extend(config.args);
        let record = self.sandbox.record();
        let program = Program {
            args: &args,
            env: &config.envs,
            cwd: Some(&cwd),
            user: Some(&user.name),
        };
        let mut of_sandbox = record.environment();
        for (name, value) in [
            ("E2B_SANDBOX", "true"),
            ("E2B_SANDBOX_ID", self.sandbox.id.as_str()),
            (
                "E2B_TEMPLATE_ID",
                record
                    .labels
                    .get(labels::TEMPLATE)
                    .map_or("", String::as_str),
            ),
        ] {
            of_sandbox
                .entry(name.to_owned())
                .or_insert_with(|| value.to_owned());
        }
        Ok(guest::ExecRequest {
            stdin: request.stdin.unwrap_or(true),
            pty: request.pty.map(|pty| size(pty.size.unwrap_or_default())),
            timeout_ms: self.timeout_ms,
            grace_ms: Some(100),
            on_disconnect: guest::OnDisconnect::Keep,
            tag: request.tag,
            ..exec::wish(&program, &of_sandbox)?
        })
    }

    async fn follow(self, mut incoming: Incoming, outgoing: Outgoing) {
        let attached = async {
            let request = incoming.next::<ProcessRequest>().await?;
            let request = request.ok_or_else(|| RpcError::invalid("the request is missing"))?;
            let client = self.sandbox.agent().await?;
            let found = find(&client, request.process).await?;
            let exec = client
                .by(agent_limits::start())
                .attach(guest::AttachRequest {
                    process: found.process,
                    lossless: true,
                    ..guest::AttachRequest::default()
                })
                .await
                .map_err(Error::agent("the process cannot be followed"))?;
            Ok::<_, RpcError>((exec, found.pty))
        };
        match attached.await {
            Ok((exec, pty)) => self.pump(exec, pty, false, outgoing).await,
            Err(error) => outgoing.finish(Err(error)).await,
        }
    }

    /// Sends the events of a process until its end, the deadline, or the end of the connection. With `drain` the output
    /// is read to its end in any case.
    async fn pump(&self, mut exec: Exec, pty: bool, drain: bool, outgoing: Outgoing) {
        let deadline = self
            .timeout_ms
            .map(|ms| Instant::now() + Duration::from_millis(ms));
        let result = self.send_events(&mut exec, pty, deadline, &outgoing).await;
        match result {
            Ok(None) => {
                let ended = exec.wait().await;
                finish(ended, outgoing).await;
                return;
            }
            Ok(Some(error)) => outgoing.finish(Err(error)).await,
            Err(Disconnected) => drop(outgoing),
        }
        if drain {
            let _ = exec.wait().await;
        }
    }

    /// Sends output until there is no more. An error is the end of the stream.
    async fn send_events(
        &self,
        exec: &mut Exec,
        pty: bool,
        deadline: Option<Instant>,
        outgoing: &Outgoing,
    ) -> Result<Option<RpcError>, Disconnected> {
        let pid = exec.started().pid;
        let start = EventResponse::of(Event::Start(StartEvent { pid }));
        outgoing.send(&start).await?;
        loop {
            let silent = Instant::now() + self.keepalive;
            let output = tokio::select! {
                output = exec.next_output() => output,
                () = sleep_until(silent) => {
                    let alive = EventResponse::of(Event::Keepalive(Empty {}));
                    outgoing.send(&alive).await?;
                    continue;
                }
                () = until(deadline) => {
                    let over = RpcError::new(Code::DeadlineExceeded, "the time of the process is over");
                    return Ok(Some(over));
                }
                () = outgoing.closed() => return Err(Disconnected),
            };
            match output {
                Ok(Some(output)) => {
                    if let Some(event) = data(output, pty) {
                        outgoing.send(&EventResponse::of(event)).await?;
                    }
                }
                Ok(None) => return Ok(None),
                Err(_) => return Ok(Some(lost())),
            }
        }
    }
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// The connection to the guest has ended: the sandbox was killed, paused or rolled back.
fn lost() -> RpcError {
    RpcError::new(Code::Unavailable, "the sandbox does not answer any more")
}

async fn finish(ended: Result<guest::ExecResult, forkd_agent_client::Error>, outgoing: Outgoing) {
    let result = match ended {
        Err(_) => Err(lost()),
        Ok(result) if result.timed_out => Err(RpcError::new(
            Code::DeadlineExceeded,
            "the time of the process is over",
        )),
        Ok(result) => {
            let end = EventResponse::of(Event::End(end(result.status)));
            let _ = outgoing.send(&end).await;
            Ok(())
        }
    };
    outgoing.finish(result).await;
}

fn data(output: Output, pty: bool) -> Option<Event> {
    let output = match output {
        Output::Stdout(bytes) if pty => OutputBytes::Pty(bytes),
        Output::Stdout(bytes) => OutputBytes::Stdout(bytes),
        Output::Stderr(bytes) => OutputBytes::Stderr(bytes),
        Output::Lost { .. } => return None,
    };
    Some(Event::Data(DataEvent {
        output: Some(output),
    }))
}

fn end(status: guest::ExitStatus) -> EndEvent {
    let (exit_code, exited, text) = match status {
        guest::ExitStatus::Code(code) => (code, true, format!("exit status {code}")),
        guest::ExitStatus::Signal(signal) => {
            (-1, false, format!("signal: {}", signal_text(signal)))
        }
    };
    EndEvent {
        exit_code,
        exited,
        error: (exit_code != 0).then(|| text.clone()),
        status: text,
    }
}

fn signal_text(signal: i32) -> String {
    match signal {
        1 => "hangup".into(),
        2 => "interrupt".into(),
        6 => "aborted".into(),
        9 => "killed".into(),
        11 => "segmentation fault".into(),
        13 => "broken pipe".into(),
        15 => "terminated".into(),
        other => format!("signal {other}"),
    }
}

fn size(size: Size) -> guest::PtySize {
    let bounded = |number: u32, usual: u16| match u16::try_from(number) {
        Ok(0) => usual,
        Ok(number) => number,
        Err(_) => u16::MAX,
    };
    guest::PtySize {
        rows: bounded(size.rows, 24),
        cols: bounded(size.cols, 80),
    }
}

/// A program, user or directory that does not exist is an error of the request.
fn not_started(error: forkd_agent_client::Error) -> RpcError {
    let error = RpcError::from(Error::agent("the process could not be started")(error));
    match error.code {
        Code::NotFound | Code::PermissionDenied => RpcError {
            code: Code::InvalidArgument,
            ..error
        },
        _ => error,
    }
}

async fn find(
    client: &Client,
    selector: Option<ProcessSelector>,
) -> Result<guest::ProcessInfo, RpcError> {
    let selector = selector
        .and_then(|selector| selector.selector)
        .ok_or_else(|| RpcError::invalid("the process is not named"))?;
    let found = match &selector {
        Selector::Pid(pid) => {
            process::find(client, &pid.to_string(), |found| found.pid == *pid).await
        }
        Selector::Tag(tag) => {
            process::find(client, tag, |found| found.tag.as_deref() == Some(tag)).await
        }
    };
    Ok(found?)
}

/// A process that still runs.
async fn running(
    client: &Client,
    selector: Option<ProcessSelector>,
) -> Result<guest::ProcessInfo, RpcError> {
    let found = find(client, selector).await?;
    process::check_running(&found)?;
    Ok(found)
}

async fn list(sandbox: &SandboxHandle) -> Result<ListResponse, RpcError> {
    let known = process::known(&sandbox.agent().await?).await?;
    let running = known
        .into_iter()
        .filter(|process| process.state == guest::ProcessState::Running);
    let processes = running.map(|process| {
        let mut argv = process.argv.into_iter();
        ProcessInfo {
            config: Some(ProcessConfig {
                cmd: argv.next().unwrap_or_default(),
                args: argv.collect(),
                cwd: Some(process.cwd),
                ..ProcessConfig::default()
            }),
            pid: process.pid,
            tag: process.tag,
        }
    });
    Ok(ListResponse {
        processes: processes.collect(),
    })
}

/// Writes one part of input.
async fn feed(
    client: &Client,
    process: &guest::ProcessInfo,
    input: Option<ProcessInput>,
) -> Result<(), RpcError> {
    let wrong = |message| RpcError::new(Code::FailedPrecondition, message);
    let bytes = match input.and_then(|input| input.input) {
        None => return Err(RpcError::invalid("the input is missing")),
        Some(InputBytes::Pty(_)) if !process.pty => {
            return Err(wrong("the process has no terminal"));
        }
        Some(InputBytes::Stdin(_)) if process.pty => {
            return Err(wrong("the process has a terminal"));
        }
        Some(InputBytes::Stdin(bytes) | InputBytes::Pty(bytes)) => bytes,
    };
    process::write_input(client, process.process, &bytes, false)
        .await
        .map_err(no_input)
}

/// A process that runs and takes no input has closed it, or was started without one.
fn no_input(error: Error) -> RpcError {
    let error = RpcError::from(error);
    match error.code {
        Code::NotFound | Code::InvalidArgument => RpcError {
            code: Code::FailedPrecondition,
            ..error
        },
        _ => error,
    }
}

async fn send_input(sandbox: &SandboxHandle, request: SendInputRequest) -> Result<Empty, RpcError> {
    let client = sandbox.agent().await?;
    let found = running(&client, request.process).await?;
    feed(&client, &found, request.input).await?;
    Ok(Empty {})
}

async fn stream_input(sandbox: Arc<SandboxHandle>, mut incoming: Incoming, outgoing: Outgoing) {
    let work = async {
        let client = sandbox.agent().await?;
        let mut process = None;
        while let Some(message) = incoming.next::<StreamInputRequest>().await? {
            match message.event {
                Some(StreamInput::Start(start)) => {
                    process = Some(running(&client, start.process).await?);
                }
                Some(StreamInput::Data(data)) => {
                    let process = process
                        .as_ref()
                        .ok_or_else(|| RpcError::invalid("the first message names the process"))?;
                    feed(&client, process, data.input).await?;
                }
                Some(StreamInput::Keepalive(_)) | None => {}
            }
        }
        Ok(())
    };
    let result: Result<(), RpcError> = work.await;
    if result.is_ok() {
        let _ = outgoing.send(&Empty {}).await;
    }
    outgoing.finish(result).await;
}

async fn send_signal(
    sandbox: &SandboxHandle,
    request: SendSignalRequest,
) -> Result<Empty, RpcError> {
    let signal = match Signal::try_from(request.signal) {
        Ok(Signal::Sigkill) => 9,
        Ok(Signal::Sigterm) => 15,
        _ => return Err(RpcError::invalid("the signal is SIGKILL or SIGTERM")),
    };
    let client = sandbox.agent().await?;
    let found = running(&client, request.process).await?;
    process::signal(&client, found.process, signal).await?;
    Ok(Empty {})
}

async fn close_stdin(sandbox: &SandboxHandle, request: ProcessRequest) -> Result<Empty, RpcError> {
    let client = sandbox.agent().await?;
    let found = running(&client, request.process).await?;
    process::write_input(&client, found.process, &[], true)
        .await
        .map_err(no_input)?;
    Ok(Empty {})
}

async fn resize(sandbox: &SandboxHandle, request: UpdateRequest) -> Result<Empty, RpcError> {
    let client = sandbox.agent().await?;
    let found = running(&client, request.process).await?;
    if let Some(wanted) = request.pty.and_then(|pty| pty.size) {
        if !found.pty {
            return Err(RpcError::new(
                Code::FailedPrecondition,
                "the process has no terminal",
            ));
        }
        let size = size(wanted);
        process::resize(&client, found.process, size.rows, size.cols).await?;
    }
    Ok(Empty {})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_have_the_texts_of_the_protocol() {
        let good = end(guest::ExitStatus::Code(0));
        assert_eq!((good.exit_code, good.exited, good.error), (0, true, None));
        let bad = end(guest::ExitStatus::Code(3));
        assert_eq!(bad.error.as_deref(), Some("exit status 3"));
        let killed = end(guest::ExitStatus::Signal(9));
        assert_eq!((killed.exit_code, killed.exited), (-1, false));
        assert_eq!(killed.error.as_deref(), Some("signal: killed"));
    }

    #[test]
    fn a_terminal_has_a_size() {
        let of = |cols, rows| size(Size { cols, rows });
        assert_eq!((of(100, 40).cols, of(100, 40).rows), (100, 40));
        assert_eq!((of(0, 0).cols, of(0, 0).rows), (80, 24));
        assert_eq!(of(1 << 20, 1).cols, u16::MAX);
    }
}
