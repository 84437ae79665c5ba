//! Arguments of `forkd mcp`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use forkd_mcp::Selection;

use super::DaemonArgs;

/// Arguments of `forkd mcp`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd mcp install claude-code                    let Claude Code use the daemon\n  \
    forkd mcp install codex --tools all --dry-run    show the changed configuration of Codex\n  \
    forkd mcp                                        serve on stdin and stdout; clients start this")]
pub struct McpArgs {
    #[command(subcommand)]
    pub command: Option<McpCommand>,
    #[command(flatten)]
    pub tools: ToolArgs,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// The tools that a client sees, and limits on the sandboxes that they make.
#[derive(Debug, Clone, Args)]
pub struct ToolArgs {
    /// Tools that a client sees: compat, core, all, or names separated by commas
    #[arg(long, default_value = "core", value_name = "TOOLS", global = true)]
    pub tools: Selection,
    /// Leave out every tool that changes something
    #[arg(long, global = true)]
    pub read_only: bool,
    /// Live sandboxes that the tools may have made
    #[arg(long, default_value_t = 32, value_name = "N", global = true)]
    pub max_sandboxes: usize,
    /// Lifetime of a sandbox, unless a call names another one; 0s for no end
    #[arg(long, default_value = "30m", value_name = "TIME", global = true)]
    pub ttl: humantime::Duration,
}

/// Subcommands of `forkd mcp`.
#[derive(Debug, Subcommand)]
pub enum McpCommand {
    /// Add forkd to the configuration of a client, or remove it
    Install(McpInstallArgs),
}

/// Arguments of `forkd mcp install`.
#[derive(Debug, Args)]
pub struct McpInstallArgs {
    /// The program whose configuration is changed
    #[arg(value_enum)]
    pub client: McpClient,
    /// Remove forkd from the configuration
    #[arg(long)]
    pub remove: bool,
    /// Print the new content of the file and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Configuration file [default: the one that the client reads]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Name of the entry
    #[arg(long, default_value = "forkd", value_name = "NAME")]
    pub name: String,
}

/// Programs that use MCP servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum McpClient {
    /// The program Claude Desktop
    Claude,
    /// Claude Code, for all projects of this user
    ClaudeCode,
    /// The code editor Cursor
    Cursor,
    /// The editor Visual Studio Code
    Vscode,
    /// The command line agent Codex
    Codex,
    /// Cline in Visual Studio Code
    Cline,
}
