//! Background processes: those that were started through an API.

use forkd_agent_client::{Client, Exec, Input};
use forkd_api::ErrorCode;
use forkd_guest_proto as guest;
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::error::Error;

const SIGKILL: i32 = 9;

/// The processes that the agent still knows.
pub async fn known(client: &Client) -> Result<Vec<guest::ProcessInfo>, Error> {
    client
        .by(agent_limits::answer())
        .processes()
        .await
        .map_err(Error::agent("the processes cannot be listed"))
}

/// A process by a test on it; the youngest, where numbers were used again.
pub async fn find(
    client: &Client,
    shown: &str,
    fits: impl Fn(&guest::ProcessInfo) -> bool,
) -> Result<guest::ProcessInfo, Error> {
    let all = known(client).await?;
    all.into_iter().rev().find(fits).ok_or_else(|| {
        let shown: String = shown.chars().take(40).collect();
        Error::refused(
            ErrorCode::ProcessNotFound,
            format!("no process {shown} was started through the API"),
        )
    })
}

/// Refuses a process that has ended.
pub fn check_running(process: &guest::ProcessInfo) -> Result<(), Error> {
    if process.state == guest::ProcessState::Running {
        return Ok(());
    }
    Err(Error::refused(
        ErrorCode::ProcessNotFound,
        format!("process {} has ended", process.pid),
    ))
}

/// Starts a program that goes on without its client.
pub async fn start(client: &Client, wish: guest::ExecRequest) -> Result<guest::Started, Error> {
    let wish = guest::ExecRequest {
        timeout_ms: None,
        on_disconnect: guest::OnDisconnect::Keep,
        ..wish
    };
    client
        .by(agent_limits::start())
        .start(wish)
        .await
        .map_err(Error::agent("the command could not be started"))
}

/// Follows a process; `since` asks for what is kept of earlier output from there on.
pub async fn follow(
    client: &Client,
    process: guest::ProcessId,
    since: Option<guest::OutputPosition>,
) -> Result<Exec, Error> {
    client
        .by(agent_limits::start())
        .attach(guest::AttachRequest {
            process,
            replay: since.is_some(),
            since,
            stdin: false,
            lossless: false,
        })
        .await
        .map_err(Error::agent("the process cannot be followed"))
}

/// Opens the standard input of a process for one part.
pub fn input(client: &Client, process: guest::ProcessId, eof: bool) -> Result<Input, Error> {
    client
        .by(agent_limits::start())
        .input(process, eof)
        .map_err(no_input())
}

/// Writes one part to the standard input of a process.
pub async fn write_input(
    client: &Client,
    process: guest::ProcessId,
    bytes: &[u8],
    eof: bool,
) -> Result<(), Error> {
    let by = agent_limits::start();
    let part = input(client, process, eof)?;
    part.write(bytes, by).await.map_err(no_input())?;
    part.finish(by).await.map_err(no_input())
}

pub fn no_input() -> impl FnOnce(forkd_agent_client::Error) -> Error {
    Error::agent("the process did not take the input")
}

/// Sends a signal to a process and its group. `SIGKILL` returns when the process has ended, so that a list right after
/// it does not show the process as running.
pub async fn signal(client: &Client, process: guest::ProcessId, signal: i32) -> Result<(), Error> {
    client
        .by(agent_limits::answer())
        .signal(process, signal, true)
        .await
        .map_err(Error::agent("the signal could not be sent"))?;
    if signal == SIGKILL {
        // The signal was sent. A guest that is too slow to report the end does not turn that into a failure.
        let _ = client.by(agent_limits::ending()).wait(process).await;
    }
    Ok(())
}

/// Tells a terminal its size.
pub async fn resize(
    client: &Client,
    process: guest::ProcessId,
    rows: u16,
    cols: u16,
) -> Result<(), Error> {
    if rows == 0 || cols == 0 {
        return Err(Error::refused(
            ErrorCode::InvalidRequest,
            "rows and cols are at least 1",
        ));
    }
    client
        .by(agent_limits::answer())
        .resize(process, rows, cols)
        .await
        .map_err(Error::agent("the terminal could not be resized"))
}
