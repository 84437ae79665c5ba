//! Starts a program of this host that listens on a Unix socket: `forkd-spawn` or `forkd-net`.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

/// How often the connection is tried after the program was started.
const ATTEMPTS: u32 = 500;
/// How long to wait between two attempts.
const PAUSE: Duration = Duration::from_millis(10);

/// Why a program is of no use.
pub enum NotStarted<E> {
    /// The program does not run.
    Io(io::Error),
    /// The program runs and cannot be connected to.
    Connect(E),
}

/// Starts the program in a process group of its own, so that a signal to the daemon's group does not end the program,
/// and connects to it. `is_final` says that another attempt would be of no use.
pub async fn start<T, E>(
    program: &Path,
    socket: &Path,
    arguments: &[OsString],
    connect: impl AsyncFn(&Path) -> Result<T, E>,
    is_final: impl Fn(&E) -> bool,
) -> Result<T, NotStarted<E>> {
    let name = program.file_name().unwrap_or_default();
    let name = name.to_string_lossy().into_owned();
    let mut child = Command::new(program)
        .arg("--socket")
        .arg(socket)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .process_group(0)
        .spawn()
        .map_err(NotStarted::Io)?;
    tracing::info!(pid = child.id(), program = %program.display(), "{name} started");
    let mut last = None;
    for _ in 0..ATTEMPTS {
        match connect(socket).await {
            Ok(connected) => {
                tokio::spawn(async move {
                    let status = child.wait().await;
                    tracing::info!(?status, "{name} ended");
                });
                return Ok(connected);
            }
            Err(error) if is_final(&error) => return Err(NotStarted::Connect(error)),
            Err(error) => last = Some(error),
        }
        tokio::select! {
            status = child.wait() => {
                let text = format!("{} ended at once: {status:?}", program.display());
                return Err(NotStarted::Io(io::Error::other(text)));
            }
            () = tokio::time::sleep(PAUSE) => {}
        }
    }
    Err(last.map_or_else(
        || NotStarted::Io(io::ErrorKind::TimedOut.into()),
        NotStarted::Connect,
    ))
}
