//! Arguments of `forkd secret`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::DaemonArgs;

/// Arguments of `forkd secret`.
#[derive(Debug, Args)]
#[command(
    after_help = "A value is read from standard input, a file or a variable, and never from an argument: arguments\n\
    are visible to other users. It cannot be shown again.\n\nExamples:\n  \
    forkd secret set openai < key.txt                 store a value, or replace it\n  \
    forkd secret set openai --env OPENAI_API_KEY      the same from a variable\n  \
    forkd run --inject 'api.example Authorization: Bearer ${secret:openai}' -- python3 agent.py"
)]
pub struct SecretArgs {
    #[command(subcommand)]
    pub command: SecretCommand,
    /// Print the result as JSON
    #[arg(long, global = true)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Subcommands of `forkd secret`.
#[derive(Debug, Subcommand)]
pub enum SecretCommand {
    /// Store the value of a secret, or replace it; running sandboxes use it at once
    Set {
        /// Name by which policies refer to the secret
        name: String,
        /// Read the value from this environment variable
        #[arg(long, value_name = "VARIABLE", conflicts_with = "file")]
        env: Option<String>,
        /// Read the value from this file
        #[arg(long, value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// List the names of your secrets
    Ls,
    /// Delete secrets; requests that need one are refused
    Rm {
        /// Names of secrets
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
}
