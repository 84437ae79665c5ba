//! Arguments of `forkd token`.

use clap::{Args, Subcommand};
use forkd_api::Role;

use super::DaemonArgs;

/// Arguments of `forkd token`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd token create root --role admin             the first token; from then on every client needs one\n  \
    forkd token create ci --owner team               may use what belongs to \"team\"\n  \
    forkd token create dashboard --owner team --role read")]
pub struct TokenArgs {
    #[command(subcommand)]
    pub command: TokenCommand,
    /// Print the result as JSON
    #[arg(long, global = true)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Subcommands of `forkd token`.
#[derive(Debug, Subcommand)]
pub enum TokenCommand {
    /// Make a token and print it; it cannot be shown again
    Create {
        /// The name under which the token is listed, logged and revoked
        name: String,
        /// Who owns what the token makes [default: the name of the token]
        #[arg(long)]
        owner: Option<String>,
        /// Rights of the token: read, use or admin
        #[arg(long, default_value_t = Role::Use)]
        role: Role,
    },
    /// List the tokens of the daemon
    Ls,
    /// Revoke tokens: the next request with one is refused
    Revoke {
        /// Names of tokens
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
}
