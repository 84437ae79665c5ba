//! The daemon.

use forkd_api::{API_VERSION, ErrorCode};

use super::Check;
use crate::args::DaemonArgs;
use crate::daemon::connect;

/// The shortest token that is not weak.
const LONG_ENOUGH: usize = 32;

pub async fn checks(args: &DaemonArgs) -> Vec<Check> {
    let mut checks = vec![token(args)];
    let Ok(client) = connect(args) else {
        checks.push(Check::fail(
            "daemon",
            "its address cannot be used",
            "write http://HOST:PORT or unix:///PATH",
        ));
        return checks;
    };
    let target = client.target().to_string();
    match client.version().await {
        Ok(version) => {
            checks.push(Check::pass(
                "daemon",
                format!("{} at {target}", version.version),
            ));
            let own = env!("CARGO_PKG_VERSION");
            checks.push(if version.api != API_VERSION {
                Check::fail(
                    "daemon version",
                    format!("API {}", version.api),
                    "forkd and its daemon do not fit together",
                )
            } else if version.version == own {
                Check::pass("daemon version", own)
            } else {
                Check::warn(
                    "daemon version",
                    format!("daemon {}, forkd {own}", version.version),
                    "update the older one",
                )
            });
        }
        Err(error)
            if matches!(
                error.code(),
                Some(ErrorCode::MissingToken | ErrorCode::InvalidToken)
            ) =>
        {
            checks.push(Check::fail(
                "daemon",
                format!("{target}: {error}"),
                "set FORKD_TOKEN or give --daemon-token",
            ));
            return checks;
        }
        Err(error) => {
            checks.push(Check::warn(
                "daemon",
                error.to_string(),
                "start one with `forkd-controller serve` or `forkd machine start`",
            ));
            return checks;
        }
    }
    checks.push(match client.health().await {
        Ok(_) => Check::pass("daemon health", "well"),
        Err(error) => Check::fail(
            "daemon health",
            error.to_string(),
            "GET /healthz says what does not work",
        ),
    });
    checks.push(match client.fsck(false).await {
        Ok(report) if report.problems.is_empty() => Check::pass(
            "store",
            format!("{} snapshots, all whole", report.snapshots),
        ),
        Ok(report) => Check::fail(
            "store",
            report.problems.join("; "),
            "delete the damaged snapshots and build them again",
        ),
        Err(error) => Check::warn("store", error.to_string(), "the daemon's log says more"),
    });
    checks
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
