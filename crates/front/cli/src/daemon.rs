//! Finding the daemon and explaining its failures.

use std::path::PathBuf;

use anyhow::anyhow;
use forkd_api::{DEFAULT_URL, ErrorCode};
use forkd_machine::{Machine, MachineName};
use forkd_rest_client::{Client, Error, InvalidTarget, Target};

use crate::args::DaemonArgs;
use crate::error::{CliError, CliResult};

/// Path of the daemon's socket below a run directory.
const SOCKET: &str = "forkd/forkd.sock";

/// A client for the daemon that the arguments name, else for the one that [`target`] finds. Does not connect yet.
pub fn connect(args: &DaemonArgs) -> Result<Client, CliError> {
    let target = target(args).map_err(|error| failed(Error::Target(error)))?;
    let token = args.daemon_token.clone();
    match &args.daemon_cacert {
        Some(path) => {
            let pem = std::fs::read(path).map_err(|error| {
                anyhow!(error).context(format!("cannot read {}", path.display()))
            })?;
            Client::trusting(&target, token, &pem).map_err(failed)
        }
        None => Client::new(&target, token).map_err(failed),
    }
}

/// The address: the named one, else the running machine, else a local socket, else the default port.
fn target(args: &DaemonArgs) -> Result<Target, InvalidTarget> {
    if let Some(url) = &args.daemon_url {
        return url.parse();
    }
    if let Some(port) = machine_port() {
        return format!("http://127.0.0.1:{port}").parse();
    }
    local_socket().map_or_else(|| DEFAULT_URL.parse(), |path| Ok(Target::Unix(path)))
}

/// The forwarded port of the machine that `forkd machine` uses without `--name`, if it runs.
pub fn machine_port() -> Option<u16> {
    let name = match variable("FORKD_MACHINE") {
        Some(name) => name.parse().ok()?,
        None => MachineName::default(),
    };
    Machine::named(name).ok()?.daemon_port()
}

/// A variable of the environment. An empty one counts as not set.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn local_socket() -> Option<PathBuf> {
    let user = variable("XDG_RUNTIME_DIR").map(PathBuf::from);
    [Some(PathBuf::from("/run")), user]
        .into_iter()
        .flatten()
        .map(|dir| dir.join(SOCKET))
        // Permission denied means the socket exists.
        .find(|path| path.try_exists().unwrap_or(true))
}

/// Runs the asynchronous part of a command.
pub fn block_on(work: impl Future<Output = CliResult>) -> CliResult {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let result = runtime.block_on(work);
    // A pending read of standard input must not delay the exit.
    runtime.shutdown_background();
    result
}

/// Adds a hint to an error of the client.
pub fn failed(error: Error) -> CliError {
    let hint = match &error {
        Error::Unreachable { source, .. } if source.to_string().contains("certificate") => Some(
            "trust the daemon's certificate with --daemon-cacert or FORKD_CACERT, and use the host name that the certificate has"
                .to_owned(),
        ),
        Error::Unreachable { .. } if error.is_forbidden() => Some(
            "join the group forkd (sudo usermod -aG forkd NAME, then log in again), or run this as root"
                .to_owned(),
        ),
        Error::Unreachable { target, .. } => Some(start_hint(target)),
        Error::Refused { .. } if error.code() == Some(ErrorCode::MissingToken) => {
            Some("set FORKD_TOKEN or give --daemon-token".to_owned())
        }
        other => other.hint().map(str::to_owned),
    };
    CliError::new(error.into(), hint)
}

fn start_hint(target: &str) -> String {
    let elsewhere = if target == DEFAULT_URL {
        ""
    } else {
        ", or name the address of another one with --daemon-url or FORKD_URL"
    };
    format!(
        "start a daemon with `forkd-controller serve`, or with `forkd machine start` on a host without KVM{elsewhere}"
    )
}
