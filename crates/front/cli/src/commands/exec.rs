//! `forkd exec`: a command in a sandbox.

use std::io::Write;

use anyhow::anyhow;
use base64::Engine;
use forkd_api::{ErrorBody, ErrorCode, ExecFrame, ExecRequest, TerminalInput, TerminalStart};
use forkd_rest_client::{Client, Error, TerminalEvent};
use tokio::io::AsyncReadExt;

use crate::args::ExecArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliError, CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd exec`.
pub fn run(args: &ExecArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    let request = ExecRequest {
        args: args.command.clone(),
        timeout_secs: args.timeout_secs,
        env: args.env.iter().cloned().collect(),
        cwd: args.cwd.clone(),
        user: args.user.clone(),
        stdin: None,
    };
    block_on(async {
        if args.json {
            return whole(&client, &args.id, &request, ui).await;
        }
        if args.interactive {
            return with_input(&client, &args.id, request).await;
        }
        stream(&client, &args.id, &request).await
    })
}

/// Runs a command, prints what became of it as JSON, and gives its exit code.
pub async fn whole(client: &Client, id: &str, request: &ExecRequest, ui: &Ui) -> CliResult {
    let done = client.exec(id, request).await.map_err(failed)?;
    ui.json(&done)?;
    Ok(exit_of(done.exit_code))
}

/// Runs a command, passes its output on as it comes, and gives its exit code.
pub async fn stream(client: &Client, id: &str, request: &ExecRequest) -> CliResult {
    let mut frames = client.exec_stream(id, request).await.map_err(failed)?;
    while let Some(frame) = frames.next().await.map_err(failed)? {
        match frame {
            ExecFrame::Started { .. } => {}
            ExecFrame::Stdout { text, base64 } => write(&mut std::io::stdout(), text, base64)?,
            ExecFrame::Stderr { text, base64 } => write(&mut std::io::stderr(), text, base64)?,
            ExecFrame::Exit {
                exit_code,
                timed_out,
            } => return Ok(finish(exit_code, timed_out, request.timeout_secs)),
            ExecFrame::Error { error, code } => return Err(broken(error, code)),
        }
    }
    Err(anyhow!("the daemon's answer ended before the command did").into())
}

/// What the daemon says when it is too late for a status.
pub fn broken(error: String, code: ErrorCode) -> CliError {
    failed(Error::Refused {
        status: 200,
        body: ErrorBody {
            error,
            code,
            hint: None,
            request_id: None,
        },
    })
}

fn finish(exit_code: i64, timed_out: bool, seconds: u64) -> Exit {
    if timed_out {
        eprintln!("forkd: killed after {seconds} s");
    }
    exit_of(exit_code)
}

/// As a shell says it: 128 and the signal.
pub fn exit_of(code: i64) -> Exit {
    let code = if code < 0 { 128 - code } else { code };
    Exit(u8::try_from(code).unwrap_or(255))
}

fn write(
    out: &mut impl Write,
    text: Option<String>,
    base64: Option<String>,
) -> Result<(), CliError> {
    let bytes = match (text, base64) {
        (Some(text), _) => text.into_bytes(),
        (None, Some(encoded)) => base64::engine::general_purpose::STANDARD
            .decode(encoded)
            .map_err(anyhow::Error::from)?,
        (None, None) => return Ok(()),
    };
    out.write_all(&bytes)?;
    out.flush()?;
    Ok(())
}

async fn with_input(client: &Client, id: &str, request: ExecRequest) -> CliResult {
    let start = TerminalStart {
        args: request.args,
        env: request.env,
        cwd: request.cwd,
        user: request.user,
        rows: None,
        cols: None,
    };
    let mut terminal = client.terminal(id, &start).await.map_err(failed)?;
    let mut input = tokio::io::stdin();
    let mut buffer = vec![0; 32 * 1024];
    let mut open = true;
    loop {
        tokio::select! {
            event = terminal.next() => match event.map_err(failed)? {
                Some(TerminalEvent::Stdout(bytes)) => {
                    std::io::stdout().write_all(&bytes)?;
                    std::io::stdout().flush()?;
                }
                Some(TerminalEvent::Stderr(bytes)) => std::io::stderr().write_all(&bytes)?,
                Some(TerminalEvent::Frame(ExecFrame::Exit { exit_code, timed_out })) => {
                    return Ok(finish(exit_code, timed_out, 0));
                }
                Some(TerminalEvent::Frame(ExecFrame::Error { error, code })) => return Err(broken(error, code)),
                Some(TerminalEvent::Frame(_)) => {}
                None => return Err(anyhow!("the connection ended before the command did").into()),
            },
            count = input.read(&mut buffer), if open => match count? {
                0 => {
                    open = false;
                    terminal.control(&TerminalInput::Eof).await.map_err(failed)?;
                }
                count => {
                    let bytes = buffer.get(..count).unwrap_or_default().to_vec();
                    terminal.write(bytes).await.map_err(failed)?;
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_become_what_a_shell_says() {
        assert_eq!(exit_of(0), Exit(0));
        assert_eq!(exit_of(7), Exit(7));
        assert_eq!(exit_of(-9), Exit(137));
        assert_eq!(exit_of(9999), Exit(255));
    }
}
