//! What can be typed. One file per subcommand; no behaviour here.

mod completions;
pub mod machine;
mod man;
mod r#where;

use clap::{Parser, Subcommand};

pub use completions::CompletionsArgs;
pub use machine::MachineArgs;
pub use man::ManArgs;
pub use r#where::WhereArgs;

/// fork(2) for machines: start microVMs copy-on-write from a warm parent.
#[derive(Debug, Parser)]
#[command(
    name = "forkd",
    version,
    propagate_version = true,
    disable_help_subcommand = true,
    arg_required_else_help = true,
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage; `exec` passes the guest's own code on.\n\
                  Colour is off when NO_COLOR is set or the output is not a terminal."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// Every subcommand of `forkd`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Manage a VM in which KVM works, for hosts that have none
    Machine(MachineArgs),
    /// Print where forkd keeps its files
    Where(WhereArgs),
    /// Print a completion script for a shell
    Completions(CompletionsArgs),
    /// Print the manual page
    Man(ManArgs),
}
