//! `forkd shell`: a terminal in a sandbox.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};

use anyhow::anyhow;
use forkd_api::{ExecFrame, TerminalInput, TerminalStart};
use forkd_client::{Terminal, TerminalEvent};
use rustix::termios::{OptionalActions, Termios, Winsize, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{SignalKind, signal};

use super::exec::exit_of;
use crate::args::ShellArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Puts the terminal back as it was.
struct Raw(Termios);

impl Raw {
    fn enter() -> std::io::Result<Self> {
        let before = tcgetattr(std::io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(std::io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Self(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // Nothing can be done about a terminal that is gone.
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.0);
    }
}

fn size() -> (u16, u16) {
    match tcgetwinsize(std::io::stdin()) {
        Ok(Winsize { ws_row, ws_col, .. }) if ws_row > 0 && ws_col > 0 => (ws_row, ws_col),
        _ => (24, 80),
    }
}

/// Runs `forkd shell`.
pub fn run(args: ShellArgs, _ui: &Ui) -> CliResult {
    if !std::io::stdin().is_terminal() {
        return Err(
            crate::error::CliError::from(anyhow!("standard input is no terminal"))
                .with_hint(format!("use `forkd exec -i {} -- COMMAND`", args.id)),
        );
    }
    let client = connect(&args.daemon)?;
    let (rows, cols) = size();
    let term = std::env::var("TERM").unwrap_or_else(|_| "xterm".into());
    let start = TerminalStart {
        args: args.command,
        env: BTreeMap::from([("TERM".to_owned(), term)]),
        cwd: None,
        user: args.user,
        rows: Some(rows),
        cols: Some(cols),
    };
    block_on(async {
        let terminal = client.terminal(&args.id, &start).await.map_err(failed)?;
        let raw = Raw::enter()?;
        let exit = talk(terminal).await;
        drop(raw);
        exit
    })
}

async fn talk(mut terminal: Terminal) -> CliResult {
    let mut resized = signal(SignalKind::window_change())?;
    let mut input = tokio::io::stdin();
    let mut buffer = vec![0; 4096];
    loop {
        tokio::select! {
            event = terminal.next() => match event.map_err(failed)? {
                Some(TerminalEvent::Stdout(bytes) | TerminalEvent::Stderr(bytes)) => {
                    std::io::stdout().write_all(&bytes)?;
                    std::io::stdout().flush()?;
                }
                Some(TerminalEvent::Frame(ExecFrame::Exit { exit_code, .. })) => return Ok(exit_of(exit_code)),
                Some(TerminalEvent::Frame(ExecFrame::Error { error, .. })) => return Err(anyhow!(error).into()),
                Some(TerminalEvent::Frame(_)) => {}
                None => return Ok(Exit::OK),
            },
            count = input.read(&mut buffer) => {
                let count = count?;
                if count == 0 {
                    terminal.control(&TerminalInput::Eof).await.map_err(failed)?;
                    return Ok(Exit::OK);
                }
                let bytes = buffer.get(..count).unwrap_or_default().to_vec();
                terminal.write(bytes).await.map_err(failed)?;
            }
            _ = resized.recv() => {
                let (rows, cols) = size();
                terminal.control(&TerminalInput::Resize { rows, cols }).await.map_err(failed)?;
            }
        }
    }
}
