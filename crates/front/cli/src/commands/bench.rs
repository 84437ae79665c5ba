//! `forkd bench`: executes `forkd-bench`, here or in the machine.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, anyhow};
use forkd_probe::Verdict;

use super::beside::beside;
use crate::args::BenchArgs;
use crate::daemon::{machine_port, variable};
use crate::error::{CliError, CliResult};
use crate::ui::Ui;

const PROGRAM: &str = "forkd-bench";

/// Runs `forkd bench`.
pub fn run(args: &BenchArgs, ui: &Ui) -> CliResult {
    let this = std::env::current_exe().context("cannot find this program")?;
    let mut command = if needs_guests(&args.args) && in_machine()? {
        ui.talk("/dev/kvm of this host cannot run guests: measuring in the machine");
        let mut command = Command::new(&this);
        command.args(["machine", "exec", "--", PROGRAM]);
        command
    } else {
        Command::new(beside(&this, PROGRAM)?)
    };
    if args.args.is_empty() {
        command.arg("--help");
    }
    // Clients are measured on this host, where their libraries are, wherever the daemon runs.
    if measures_clients(&args.args)
        && variable("FORKD_URL").is_none()
        && let Some(port) = machine_port()
    {
        command.env("FORKD_URL", format!("http://127.0.0.1:{port}"));
    }
    command.args(&args.args);
    // exec returns only on failure.
    Err(CliError::from(anyhow::Error::from(command.exec()).context(
        format!("cannot start {}", command.get_program().display()),
    )))
}

fn measures_clients(args: &[String]) -> bool {
    args.first().is_some_and(|name| name == "clients")
}

/// Whether the benchmark runs where the guests are. `--help` never does.
fn needs_guests(args: &[String]) -> bool {
    let help = |arg: &String| matches!(arg.as_str(), "-h" | "--help" | "help");
    let without = |name: &String| matches!(name.as_str(), "primitives" | "net" | "clients");
    args.first().is_some_and(|name| !without(name)) && !args.iter().any(help)
}

fn in_machine() -> Result<bool, CliError> {
    if forkd_probe::probe().verdict == Verdict::Native {
        return Ok(false);
    }
    if machine_port().is_some() {
        return Ok(true);
    }
    Err(CliError::from(anyhow!(
        "/dev/kvm of this host cannot run guests, and no machine is running"
    ))
    .with_hint("start one with `forkd machine start`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_and_primitives_run_here() {
        let guests = |line: &str| {
            let args: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            needs_guests(&args)
        };
        assert!(guests("fork --n 1"));
        assert!(!guests("primitives --json"));
        assert!(!guests("clients --rounds 3"));
        assert!(!guests("fork --help"));
        assert!(!guests("--help"));
        assert!(!guests(""));
    }
}
