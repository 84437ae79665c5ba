//! Joins a stream to a process: its output out, its input in, signals and sizes.

use std::cell::Cell;
use std::rc::Rc;

use forkd_guest_proto::{
    AgentError, AttachRequest, Control, ErrorCode, Event, ExecRequest, ExecResult, InputRequest,
    OnDisconnect, OutputPosition, ProcessId, Started, channel, frame::DATA_CHUNK,
};

use super::log::{Follower, Read};
use super::pump;
use super::table::Process;
use crate::agent::Agent;
use crate::conn::{Closed, EarlyEnd, Stream};
use crate::error;

/// The byte that a terminal takes for the end of input.
const END_OF_TRANSMISSION: &[u8] = &[4];

/// Starts a process and lets it run.
pub fn start(agent: &Agent, request: &ExecRequest) -> Result<Started, AgentError> {
    Ok(agent.processes.start(request)?.started())
}

/// Runs a process and answers when it has ended.
pub async fn exec(
    agent: &Agent,
    stream: &Stream,
    request: &ExecRequest,
) -> Result<ExecResult, AgentError> {
    let process = agent.processes.start(request)?;
    let on_disconnect = request.on_disconnect;
    let guard = Owner {
        agent,
        stream,
        process: &process,
        on_disconnect,
        done: Cell::new(false),
    };
    let out = process.stdout.follow(true, true);
    let err = process.stderr.as_ref().map(|log| log.follow(true, true));
    stream
        .send_event(&Event::Started(process.started()))
        .await
        .map_err(error::closed)?;
    let result = join(
        stream,
        &process,
        out,
        err,
        request.stdin || request.pty.is_some(),
    )
    .await?;
    guard.done.set(true);
    Ok(result)
}

/// Follows a process that runs already.
pub async fn attach(
    agent: &Agent,
    stream: &Stream,
    request: &AttachRequest,
) -> Result<ExecResult, AgentError> {
    let process = agent.processes.get(request.process)?;
    let lossless = request.lossless;
    let since = match request.replay {
        true => request.since.unwrap_or_default(),
        false => OutputPosition {
            stdout: u64::MAX,
            stderr: u64::MAX,
        },
    };
    let out = process.stdout.follow_since(since.stdout, lossless);
    let err = process
        .stderr
        .as_ref()
        .map(|log| log.follow_since(since.stderr, lossless));
    let at = OutputPosition {
        stdout: out.at(),
        stderr: err.as_ref().map_or(0, Follower::at),
    };
    stream
        .send_event(&Event::Started(Started {
            at,
            ..process.started()
        }))
        .await
        .map_err(error::closed)?;
    join(stream, &process, out, err, request.stdin).await
}

/// Writes the stream's input to a process, and closes its standard input if asked.
pub async fn input(
    agent: &Agent,
    stream: &Stream,
    request: InputRequest,
) -> Result<(), AgentError> {
    let process = agent.processes.get(request.process)?;
    let closed = || AgentError::new(ErrorCode::Gone, "the process takes no input");
    let mut stdin = process.stdin().ok_or_else(closed)?;
    while let Some(bytes) = stream.receive().await {
        if pump::write_all(&stdin, &bytes).await.is_err() {
            process.close_stdin();
            return Err(closed());
        }
        stdin = process.stdin().ok_or_else(closed)?;
    }
    if request.eof && stream.input_is_complete() {
        end_input(&process).await;
    }
    Ok(())
}

/// Waits for the end of a process.
pub async fn wait(agent: &Agent, process: ProcessId) -> Result<ExecResult, AgentError> {
    let process = agent.processes.get(process)?;
    Ok(process.wait().await)
}

/// Decides what becomes of a process whose request ends before it does.
struct Owner<'a> {
    agent: &'a Agent,
    stream: &'a Stream,
    process: &'a Process,
    on_disconnect: OnDisconnect,
    done: Cell<bool>,
}

impl Drop for Owner<'_> {
    fn drop(&mut self) {
        let lost = self.stream.ends_early() == Some(EarlyEnd::Lost);
        if self.done.get() || !lost || self.on_disconnect == OnDisconnect::Kill {
            // Either the result has been delivered, or the process dies now: no request for it follows.
            let _ = self.agent.processes.forget(self.process.id);
        }
        // Otherwise it runs on, its standard input open for the next request that attaches.
    }
}

async fn join(
    stream: &Stream,
    process: &Rc<Process>,
    out: Follower,
    err: Option<Follower>,
    stdin: bool,
) -> Result<ExecResult, AgentError> {
    let output = async {
        tokio::try_join!(send_log(stream, channel::OUT, out), async {
            match err {
                Some(err) => send_log(stream, channel::ERR, err).await,
                None => Ok(()),
            }
        })?;
        Ok(process.wait().await)
    };
    let input = async {
        if stdin {
            feed(stream, process).await;
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        result = output => result.map_err(error::closed),
        () = input => Err(AgentError::new(ErrorCode::Internal, "input ended the request")),
        () = obey(stream, process) => Err(AgentError::new(ErrorCode::Internal, "controls ended")),
    }
}

async fn send_log(stream: &Stream, channel: u8, follower: Follower) -> Result<(), Closed> {
    loop {
        follower.ready().await;
        let credit = stream.reserve(channel, DATA_CHUNK).await?;
        match follower.read(credit) {
            Some(Read::Bytes { lost, bytes }) => {
                stream.unreserve(channel, credit, bytes.len());
                if lost > 0 {
                    stream
                        .send_event(&Event::Lost {
                            channel,
                            bytes: lost,
                        })
                        .await?;
                }
                stream.send_reserved(channel, &bytes).await?;
            }
            Some(Read::End) => {
                stream.unreserve(channel, credit, 0);
                return stream.send_end(channel).await;
            }
            None => stream.unreserve(channel, credit, 0),
        }
    }
}

/// Feeds the stream's input to the process. Input for a process that does not want it any more is thrown
/// away.
async fn feed(stream: &Stream, process: &Process) {
    while let Some(bytes) = stream.receive().await {
        let Some(stdin) = process.stdin() else {
            continue;
        };
        if pump::write_all(&stdin, &bytes).await.is_err() {
            process.close_stdin();
        }
    }
    if stream.input_is_complete() {
        end_input(process).await;
    }
}

async fn end_input(process: &Process) {
    if !process.pty {
        process.close_stdin();
    } else if let Some(stdin) = process.stdin() {
        let _ = pump::write_all(&stdin, END_OF_TRANSMISSION).await;
    }
}

async fn obey(stream: &Stream, process: &Process) {
    loop {
        match stream.next_control().await {
            Control::Signal { signal, group } => {
                let _ = process.signal(signal, group);
            }
            Control::Resize { rows, cols } => {
                let _ = process.resize(rows, cols);
            }
            Control::Cancel | Control::Unknown => {}
        }
    }
}
