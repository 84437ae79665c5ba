//! `forkd gateway`: executes `forkd-gateway`.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::Context;

use super::beside::beside;
use crate::args::GatewayArgs;
use crate::error::{CliError, CliResult};

/// Runs `forkd gateway`.
pub fn run(args: &GatewayArgs) -> CliResult {
    let this = std::env::current_exe().context("cannot find this program")?;
    let mut command = Command::new(beside(&this, "forkd-gateway")?);
    command.args(&args.args);
    // exec returns only on failure.
    Err(CliError::from(anyhow::Error::from(command.exec()).context(
        format!("cannot start {}", command.get_program().display()),
    )))
}
