//! `forkd exec`: runs a command in a sandbox.
//!
//! A command runs in one of four ways, chosen by [`Mode`]; `forkd run` uses the same ways in a sandbox of its own.

use std::io::Write;

use anyhow::anyhow;
use base64::Engine;
use forkd_api::{
    ErrorBody, ErrorCode, ExecFrame, ExecRequest, ExecResponse, TerminalInput, TerminalStart,
};
use forkd_rest_client::{Client, Error, TerminalEvent};
use tokio::io::AsyncReadExt;

use super::shell;
use crate::args::{ExecArgs, ProcessArgs};
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliError, CliResult, Exit};
use crate::ui::Ui;

/// How input and output of a command are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// No input; output is collected and printed as JSON.
    Json,
    /// No input; output is passed on as it comes.
    Stream,
    /// Input and output are passed on as they come.
    Interactive,
    /// The command has a terminal.
    Terminal,
}

impl Mode {
    /// clap refuses `--json` together with the others.
    pub fn of(process: &ProcessArgs, json: bool) -> Self {
        if json {
            Self::Json
        } else if process.tty {
            Self::Terminal
        } else if process.interactive {
            Self::Interactive
        } else {
            Self::Stream
        }
    }

    /// Whether the user at the other end decides how long the command runs.
    pub fn has_input(self) -> bool {
        matches!(self, Self::Interactive | Self::Terminal)
    }
}

/// Runs `forkd exec`.
pub fn run(args: &ExecArgs, ui: &Ui) -> CliResult {
    let mode = Mode::of(&args.process, args.json);
    if mode == Mode::Terminal {
        shell::need_terminal(&format!("use `forkd exec -i {} -- COMMAND`", args.id))?;
    }
    let client = connect(&args.daemon)?;
    let request = request(&args.process, args.command.clone(), args.timeout_secs);
    block_on(async {
        match mode {
            Mode::Json => {
                let done = collected(&client, &args.id, &request).await?;
                ui.json(&done)?;
                Ok(exit_of(done.exit_code))
            }
            Mode::Stream => stream(&client, &args.id, &request).await,
            Mode::Interactive => with_input(&client, &args.id, request).await,
            Mode::Terminal => shell::on_terminal(&client, &args.id, terminal(request)).await,
        }
    })
}

/// The request for a command.
pub fn request(process: &ProcessArgs, args: Vec<String>, timeout_secs: u64) -> ExecRequest {
    ExecRequest {
        args,
        timeout_secs,
        env: process.env.iter().cloned().collect(),
        cwd: process.workdir.clone(),
        user: process.user.clone(),
        stdin: None,
    }
}

/// The same request for a program that gets input. It has no timeout.
pub fn terminal(request: ExecRequest) -> TerminalStart {
    TerminalStart {
        args: request.args,
        env: request.env,
        cwd: request.cwd,
        user: request.user,
        rows: None,
        cols: None,
    }
}

/// Runs a command to its end and returns its output.
pub async fn collected(
    client: &Client,
    id: &str,
    request: &ExecRequest,
) -> Result<ExecResponse, CliError> {
    client.exec(id, request).await.map_err(failed)
}

/// Runs a command, passes its output on as it comes, and returns its exit code.
pub async fn stream(client: &Client, id: &str, request: &ExecRequest) -> CliResult {
    let mut frames = client.exec_stream(id, request).await.map_err(failed)?;
    while let Some(frame) = frames.next().await.map_err(failed)? {
        match frame {
            ExecFrame::Started { .. } | ExecFrame::Keepalive => {}
            ExecFrame::Stdout { text, base64, .. } => write(&mut std::io::stdout(), text, base64)?,
            ExecFrame::Stderr { text, base64, .. } => write(&mut std::io::stderr(), text, base64)?,
            ExecFrame::Exit {
                exit_code,
                timed_out,
            } => {
                if timed_out {
                    eprintln!(
                        "forkd: timeout: the command was killed after {} s",
                        request.timeout_secs
                    );
                }
                return Ok(exit_of(exit_code));
            }
            ExecFrame::Error { error, code } => return Err(broken(error, code)),
        }
    }
    Err(anyhow!("the daemon closed the connection before the command ended").into())
}

/// A failure that the daemon reports inside of an answer whose status was already sent.
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

/// The exit code as a shell reports it: 128+N after signal N.
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

/// Runs a command with pipes: standard input goes to it until end of file, its output comes back as it is written.
pub async fn with_input(client: &Client, id: &str, request: ExecRequest) -> CliResult {
    let start = terminal(request);
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
                Some(TerminalEvent::Frame(ExecFrame::Exit { exit_code, .. })) => return Ok(exit_of(exit_code)),
                Some(TerminalEvent::Frame(ExecFrame::Error { error, code })) => return Err(broken(error, code)),
                Some(TerminalEvent::Frame(_)) => {}
                None => return Err(anyhow!("the daemon closed the connection before the command ended").into()),
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
    fn a_signal_becomes_128_plus_its_number() {
        assert_eq!(exit_of(0), Exit(0));
        assert_eq!(exit_of(7), Exit(7));
        assert_eq!(exit_of(-9), Exit(137));
        assert_eq!(exit_of(9999), Exit(255));
    }

    #[test]
    fn a_terminal_implies_input() {
        let process = |interactive, tty| ProcessArgs {
            interactive,
            tty,
            ..ProcessArgs::default()
        };
        assert_eq!(Mode::of(&process(false, false), true), Mode::Json);
        assert_eq!(Mode::of(&process(false, false), false), Mode::Stream);
        assert_eq!(Mode::of(&process(true, false), false), Mode::Interactive);
        assert_eq!(Mode::of(&process(false, true), false), Mode::Terminal);
        assert_eq!(Mode::of(&process(true, true), false), Mode::Terminal);
        assert!(Mode::Terminal.has_input() && !Mode::Stream.has_input());
    }
}
