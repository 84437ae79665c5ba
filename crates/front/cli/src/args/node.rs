//! Arguments of `forkd node` and `forkd gateway`.

use clap::{Args, Subcommand};

use super::DaemonArgs;

/// Arguments of `forkd node`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd node ls --daemon-url http://127.0.0.1:8880    the hosts of a gateway\n  \
    forkd node drain node1                              no new sandboxes there; those that run go on\n  \
    forkd node undrain node1                            new sandboxes again")]
pub struct NodeArgs {
    #[command(subcommand)]
    pub command: NodeCommand,
    /// Print the result as JSON
    #[arg(long, global = true)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Subcommands of `forkd node`.
#[derive(Debug, Subcommand)]
pub enum NodeCommand {
    /// List the hosts of a fleet, or the one host of a daemon
    Ls,
    /// Let hosts take no new sandboxes
    Drain {
        /// Names of hosts
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Let hosts take new sandboxes again
    Undrain {
        /// Names of hosts
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
}

/// Arguments of `forkd gateway`.
#[derive(Debug, Args)]
#[command(
    disable_help_flag = true,
    after_help = "Examples:\n  \
    forkd gateway --node http://10.0.0.1:8889 --node http://10.0.0.2:8889\n  \
    forkd gateway --etcd http://10.0.0.9:2379\n  \
    forkd gateway --help                  every flag"
)]
pub struct GatewayArgs {
    /// Flags of the gateway
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "FLAG"
    )]
    pub args: Vec<String>,
}
