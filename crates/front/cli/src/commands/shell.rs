//! `forkd shell`: a terminal in a sandbox.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};

use anyhow::anyhow;
use forkd_api::{ExecFrame, TerminalInput, TerminalStart};
use forkd_rest_client::{Terminal, TerminalEvent};
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{SignalKind, signal};

use super::exec::{broken, exit_of};
use crate::args::ShellArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::terminal::{self, RawMode};
use crate::ui::Ui;

/// Runs `forkd shell`.
pub fn run(args: ShellArgs, _ui: &Ui) -> CliResult {
    if !std::io::stdin().is_terminal() {
        return Err(
            crate::error::CliError::from(anyhow!("standard input is no terminal"))
                .with_hint(format!("use `forkd exec -i {} -- COMMAND`", args.id)),
        );
    }
    let client = connect(&args.daemon)?;
    let (rows, cols) = terminal::size();
    let start = TerminalStart {
        args: args.command,
        env: BTreeMap::from([("TERM".to_owned(), terminal::kind())]),
        cwd: None,
        user: args.user,
        rows: Some(rows),
        cols: Some(cols),
    };
    block_on(async {
        let program = client.terminal(&args.id, &start).await.map_err(failed)?;
        let raw = RawMode::enter()?;
        let exit = talk(program).await;
        drop(raw);
        exit
    })
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
                None => return Err(anyhow!("the connection ended before the shell did").into()),
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
