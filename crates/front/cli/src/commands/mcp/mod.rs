//! `forkd mcp`: serves tools for models, and adds forkd to the configuration of clients.

mod config;
mod install;

use anyhow::anyhow;
use forkd_mcp::{Options, Tools, stdio};

use crate::args::{McpArgs, McpCommand, ToolArgs};
use crate::daemon::{block_on, connect};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd mcp` and its subcommand.
pub fn run(args: McpArgs, ui: &Ui) -> CliResult {
    if let Some(McpCommand::Install(install)) = args.command {
        return install::run(&install, &args.tools, &args.daemon, ui);
    }
    // Does not connect yet: a client shows errors of calls, but not why a server did not start.
    let tools = Tools::new(connect(&args.daemon)?, options(&args.tools));
    block_on(async {
        stdio::serve(tools).await.map_err(|error| anyhow!(error))?;
        Ok(Exit::OK)
    })
}

fn options(args: &ToolArgs) -> Options {
    Options {
        tools: args.tools.clone(),
        read_only: args.read_only,
        max_sandboxes: args.max_sandboxes,
        ttl_secs: args.ttl.as_secs(),
    }
}
