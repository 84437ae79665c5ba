//! `forkd machine exec` and `forkd machine shell`: run a program in the machine.

use std::io::{self, IsTerminal};

use forkd_machine::{Exec, ExecRequest, OnDisconnect, Output, PtySize, Session, Silent, Stdin};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::machine;
use crate::args::machine::{ExecArgs, ShellArgs};
use crate::error::{CliError, CliResult, Exit};
use crate::terminal::{self, RawMode};
use crate::ui::Ui;

/// After this many interrupts the connection is closed, which kills the command.
const PATIENCE: u32 = 3;

/// Runs `forkd machine exec`.
pub async fn run(args: ExecArgs, ui: &Ui) -> CliResult {
    let machine = machine(&args.machine)?;
    if !args.no_sync {
        machine.sync(&Silent).await?;
    }
    let request = ExecRequest {
        argv: args.command,
        env: args
            .env
            .into_iter()
            .map(|(key, value)| (key, Some(value)))
            .collect(),
        cwd: args.cwd,
        user: args.user,
        ..Default::default()
    };
    follow(machine.connect().await?, request, args.tty, ui).await
}

/// Runs `forkd machine shell`.
pub async fn shell(args: &ShellArgs, ui: &Ui) -> CliResult {
    let machine = machine(&args.machine)?;
    machine.sync(&Silent).await?;
    let request = ExecRequest {
        argv: vec!["/bin/bash".to_owned(), "-l".to_owned()],
        ..Default::default()
    };
    follow(machine.connect().await?, request, true, ui).await
}

async fn follow(session: Session, mut request: ExecRequest, tty: bool, ui: &Ui) -> CliResult {
    request.stdin = true;
    request.on_disconnect = OnDisconnect::Kill;
    if tty {
        let (rows, cols) = terminal::size();
        request.pty = Some(PtySize { rows, cols });
        request
            .env
            .push(("TERM".to_owned(), Some(terminal::kind())));
    }
    // Installed before the command starts: a signal must not end this program in between.
    let mut signals = Signals::new()?;
    let exec = session.exec(request).await?;
    let raw = if tty && io::stdin().is_terminal() {
        Some(RawMode::enter()?)
    } else {
        None
    };
    let process = exec.started().process;
    tokio::spawn(feed(exec.stdin()));
    let output = pass_on(exec);
    tokio::pin!(output);
    let mut interrupts = 0;
    let result = loop {
        let number = tokio::select! {
            result = &mut output => break result,
            number = signals.next() => number,
        };
        if number == SignalKind::window_change().as_raw_value() {
            if tty {
                let (rows, cols) = terminal::size();
                let _ = session.client().resize(process, rows, cols).await;
            }
            continue;
        }
        if number == SignalKind::interrupt().as_raw_value() {
            interrupts += 1;
        }
        if interrupts == PATIENCE {
            drop(raw);
            ui.talk("the command does not react to signals: closing the connection kills it");
            return Ok(Exit::INTERRUPTED);
        }
        let _ = session.signal(process, number).await;
    };
    drop(raw);
    result
}

/// Forwards standard input until end of file or until the command ends.
async fn feed(stdin: Stdin) {
    let mut input = tokio::io::stdin();
    let mut chunk = vec![0; 64 * 1024];
    while let Ok(length) = input.read(&mut chunk).await {
        let bytes = chunk.get(..length).unwrap_or_default();
        if bytes.is_empty() || stdin.write(bytes).await.is_err() {
            break;
        }
    }
    stdin.close();
}

/// Forwards output until the command ends, and returns its exit code.
async fn pass_on(mut exec: Exec) -> CliResult {
    let (mut stdout, mut stderr) = (tokio::io::stdout(), tokio::io::stderr());
    while let Some(output) = exec.next_output().await.map_err(anyhow::Error::from)? {
        match output {
            Output::Stdout(bytes) => {
                stdout.write_all(&bytes).await?;
                stdout.flush().await?;
            }
            Output::Stderr(bytes) => {
                stderr.write_all(&bytes).await?;
                stderr.flush().await?;
            }
            Output::Lost { bytes, .. } => {
                return Err(CliError::from(anyhow::anyhow!(
                    "{bytes} bytes of output were lost"
                )));
            }
        }
    }
    let result = exec.wait().await.map_err(anyhow::Error::from)?;
    Ok(Exit(
        u8::try_from(result.status.shell_code() & 0xff).unwrap_or(1),
    ))
}

/// Signals that are forwarded to the command.
struct Signals {
    all: [(SignalKind, Signal); 5],
}

impl Signals {
    fn new() -> io::Result<Self> {
        let listen = |kind: SignalKind| Ok::<_, io::Error>((kind, signal(kind)?));
        Ok(Self {
            all: [
                listen(SignalKind::interrupt())?,
                listen(SignalKind::terminate())?,
                listen(SignalKind::hangup())?,
                listen(SignalKind::quit())?,
                listen(SignalKind::window_change())?,
            ],
        })
    }

    /// Waits for a signal and returns its number.
    async fn next(&mut self) -> i32 {
        let [a, b, c, d, e] = &mut self.all;
        tokio::select! {
            _ = a.1.recv() => a.0.as_raw_value(),
            _ = b.1.recv() => b.0.as_raw_value(),
            _ = c.1.recv() => c.0.as_raw_value(),
            _ = d.1.recv() => d.0.as_raw_value(),
            _ = e.1.recv() => e.0.as_raw_value(),
        }
    }
}
