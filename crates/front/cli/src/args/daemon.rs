//! Arguments that say how to reach the daemon.

use std::path::PathBuf;

use clap::Args;

/// Address and credentials of the daemon: every command that calls it has these.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Daemon")]
pub struct DaemonArgs {
    /// http://HOST:PORT, https://HOST:PORT or unix:///PATH [default: the running machine, else the local socket, else
    /// http://127.0.0.1:8889]
    #[arg(long, env = "FORKD_URL", value_name = "URL", global = true)]
    pub daemon_url: Option<String>,
    /// Bearer token of the daemon
    #[arg(
        long,
        env = "FORKD_TOKEN",
        value_name = "TOKEN",
        hide_env_values = true,
        global = true
    )]
    pub daemon_token: Option<String>,
    /// File with certificates (PEM) to trust besides those of the host, for https
    #[arg(long, env = "FORKD_CACERT", value_name = "FILE", global = true)]
    pub daemon_cacert: Option<PathBuf>,
}
