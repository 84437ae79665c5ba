//! `forkd shell`: a program in a sandbox on the user's terminal.

use std::io::{IsTerminal, Write};

use anyhow::anyhow;
use forkd_api::{ExecFrame, TerminalInput, TerminalStart};
use forkd_rest_client::{Client, Terminal, TerminalEvent};
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{SignalKind, signal};

use super::exec::{broken, exit_of};
use crate::args::ShellArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliError, CliResult, Exit};
use crate::terminal::{self, RawMode};
use crate::ui::Ui;

/// Runs `forkd shell`.
pub fn run(args: ShellArgs, _ui: &Ui) -> CliResult {
    need_terminal(&format!("use `forkd exec -i {} -- COMMAND`", args.id))?;
    let client = connect(&args.daemon)?;
    let start = TerminalStart {
        args: args.command,
        user: args.user,
        ..TerminalStart::default()
    };
    block_on(on_terminal(&client, &args.id, start))
}

/// Refuses to go on if standard input is not a terminal.
pub fn need_terminal(hint: &str) -> Result<(), CliError> {
    if std::io::stdin().is_terminal() {
        return Ok(());
    }
    Err(CliError::from(anyhow!("standard input is not a terminal")).with_hint(hint))
}

/// Runs a program on the user's terminal and returns its exit code. The guest gets the size and the kind of the terminal.
pub async fn on_terminal(client: &Client, id: &str, mut start: TerminalStart) -> CliResult {
    let (rows, cols) = terminal::size();
    start.rows = Some(rows);
    start.cols = Some(cols);
    start
        .env
        .entry("TERM".to_owned())
        .or_insert_with(terminal::kind);
    let program = client.terminal(id, &start).await.map_err(failed)?;
    let raw = RawMode::enter()?;
    let exit = talk(program).await;
    drop(raw);
    exit
}

async fn talk(mut program: Terminal) -> CliResult {
    let mut resized = signal(SignalKind::window_change())?;
    let mut input = tokio::io::stdin();
    let mut buffer = vec![0; 4096];
    loop {
        tokio::select! {
            event = program.next() => match event.map_err(failed)? {
                Some(TerminalEvent::Stdout(bytes) | TerminalEvent::Stderr(bytes)) => {
                    std::io::stdout().write_all(&bytes)?;
                    std::io::stdout().flush()?;
                }
                Some(TerminalEvent::Frame(ExecFrame::Exit { exit_code, .. })) => return Ok(exit_of(exit_code)),
                Some(TerminalEvent::Frame(ExecFrame::Error { error, code })) => return Err(broken(error, code)),
                Some(TerminalEvent::Frame(_)) => {}
                None => return Err(anyhow!("the daemon closed the connection before the program ended").into()),
            },
            count = input.read(&mut buffer) => {
                let count = count?;
                if count == 0 {
                    program.control(&TerminalInput::Eof).await.map_err(failed)?;
                    return Ok(Exit::OK);
                }
                let bytes = buffer.get(..count).unwrap_or_default().to_vec();
                program.write(bytes).await.map_err(failed)?;
            }
            _ = resized.recv() => {
                let (rows, cols) = terminal::size();
                program.control(&TerminalInput::Resize { rows, cols }).await.map_err(failed)?;
            }
        }
    }
}
