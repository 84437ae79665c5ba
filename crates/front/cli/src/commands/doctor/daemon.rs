//! Checks of the daemon.

use std::fmt;
use std::time::Duration;

use forkd_api::{API_VERSION, ErrorCode, Isolation, NetworkStatus, Version};
use forkd_rest_client::Error;

use super::Check;
use crate::args::DaemonArgs;
use crate::daemon::{connect, failed};
use crate::error::CliError;

/// Characters of a token that is long enough not to be guessed.
const LONG_ENOUGH: usize = 32;

/// Timeout of each request; a daemon in an emulated machine is slow.
const PATIENCE: Duration = Duration::from_secs(10);

pub async fn checks(args: &DaemonArgs) -> Vec<Check> {
    let mut checks = vec![token(args)];
    let client = match connect(args) {
        Ok(client) => client,
        Err(error) => {
            checks.push(unusable(&error));
            return checks;
        }
    };
    let target = client.target().to_string();
    match in_time(client.version()).await {
        Ok(version) => {
            checks.push(Check::pass(
                "daemon",
                format!("{} at {target}", version.version),
            ));
            checks.push(fits(&version));
        }
        Err(problem) => {
            checks.push(problem.of_daemon(&target));
            return checks;
        }
    }
    checks.push(match in_time(client.health()).await {
        Ok(_) => Check::pass("daemon health", "healthy"),
        Err(problem) => Check::fail(
            "daemon health",
            problem.to_string(),
            "GET /healthz lists what does not work",
        ),
    });
    match in_time(client.status()).await {
        Ok(status) => {
            checks.push(isolation("isolation", &status.isolation));
            checks.extend(status.network.as_ref().map(network));
            let engine = status
                .network
                .as_ref()
                .and_then(|network| network.isolation.as_ref());
            checks.extend(engine.map(|walls| isolation("network engine", walls)));
        }
        Err(problem) => checks.push(Check::warn(
            "isolation",
            problem.to_string(),
            "the daemon's log says more",
        )),
    }
    checks.push(match in_time(client.fsck(false)).await {
        Ok(report) if report.problems.is_empty() => Check::pass(
            "store",
            format!("{} snapshots, none damaged", report.snapshots),
        ),
        Ok(report) => Check::fail(
            "store",
            report.problems.join("; "),
            "delete the damaged snapshots and build them again",
        ),
        Err(problem) => Check::warn("store", problem.to_string(), "the daemon's log says more"),
    });
    checks
}

/// Why the daemon gave no valid answer.
enum Problem {
    Failed(Error),
    Silent,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(error) => error.fmt(f),
            Self::Silent => write!(f, "no answer after {} s", PATIENCE.as_secs()),
        }
    }
}

impl Problem {
    fn of_daemon(self, target: &str) -> Check {
        let detail = format!("{target}: {self}");
        match self {
            Self::Silent => Check::fail(
                "daemon",
                detail,
                "something listens there and says nothing: look at the daemon's log, or start it again",
            ),
            Self::Failed(error)
                if matches!(
                    error.code(),
                    Some(ErrorCode::MissingToken | ErrorCode::InvalidToken)
                ) =>
            {
                Check::fail("daemon", detail, "set FORKD_TOKEN or give --daemon-token")
            }
            Self::Failed(error) => {
                let error = failed(error);
                let hint = error.hint().unwrap_or("the daemon's log says more");
                Check::warn("daemon", error.text(), hint.to_owned())
            }
        }
    }
}

async fn in_time<T>(answer: impl Future<Output = Result<T, Error>>) -> Result<T, Problem> {
    match tokio::time::timeout(PATIENCE, answer).await {
        Ok(answer) => answer.map_err(Problem::Failed),
        Err(_) => Err(Problem::Silent),
    }
}

fn unusable(error: &CliError) -> Check {
    let hint = error
        .hint()
        .unwrap_or("check --daemon-url and --daemon-cacert, or FORKD_URL and FORKD_CACERT");
    Check::fail("daemon", error.text(), hint.to_owned())
}

fn fits(version: &Version) -> Check {
    let own = env!("CARGO_PKG_VERSION");
    if version.api != API_VERSION {
        Check::fail(
            "daemon version",
            format!("API {}", version.api),
            "forkd and its daemon have incompatible versions: install the same version of both",
        )
    } else if version.version == own {
        Check::pass("daemon version", own)
    } else {
        Check::warn(
            "daemon version",
            format!("daemon {}, forkd {own}", version.version),
            "update the older one",
        )
    }
}

/// The walls around every sandbox, or around the network engine.
fn isolation(name: &'static str, isolation: &Isolation) -> Check {
    let standing = isolation.walls.join(", ");
    if isolation.missing.is_empty() {
        return Check::pass(name, standing);
    }
    let missing: Vec<String> = isolation
        .missing
        .iter()
        .map(|missing| match &missing.reason {
            Some(reason) => format!("{} ({reason})", missing.wall),
            None => missing.wall.clone(),
        })
        .collect();
    Check::warn(
        name,
        format!("{standing}; missing: {}", missing.join(", ")),
        "run the daemon as root, by its systemd unit, on a host with cgroup v2",
    )
}

/// The network engine and the name servers of the guests.
fn network(network: &NetworkStatus) -> Check {
    let default = &network.default.mode;
    match network.engine.as_str() {
        "running" if network.resolvers.is_empty() => Check::warn(
            "network",
            format!("engine running, default {default}, no name server"),
            "put one into /etc/resolv.conf or give the daemon --network-resolver",
        ),
        "running" => Check::pass(
            "network",
            format!(
                "engine running, default {default}, name servers {}",
                network.resolvers.join(", ")
            ),
        ),
        "missing" => Check::warn(
            "network",
            "forkd-net is not installed: sandboxes can only have the mode none",
            "install forkd-net beside forkd-controller and start the daemon again",
        ),
        other => Check::fail(
            "network",
            format!("engine {other}"),
            "the daemon starts forkd-net again; its log says why that fails",
        ),
    }
}

fn token(args: &DaemonArgs) -> Check {
    match &args.daemon_token {
        None => Check::skip("token", "none set; a daemon on this host may not need one"),
        Some(token) if token.len() < LONG_ENOUGH => Check::warn(
            "token",
            format!("{} characters", token.len()),
            "make a longer one: openssl rand -hex 32",
        ),
        Some(_) => Check::pass("token", "long enough"),
    }
}
