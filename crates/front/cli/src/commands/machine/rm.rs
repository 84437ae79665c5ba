//! `forkd machine rm`: deletes a machine and its data.

use std::io::{self, IsTerminal};

use forkd_machine::{Machine, Silent, State};
use serde_json::json;

use super::machine;
use crate::args::machine::RmArgs;
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd machine rm`.
pub async fn run(args: &RmArgs, ui: &Ui) -> CliResult {
    let machine = machine(&args.machine)?;
    let mut force = args.force;
    if !force && io::stdin().is_terminal() && io::stderr().is_terminal() {
        let running = matches!(
            machine.status().await?.state,
            State::Running | State::Starting
        );
        let doing = if running {
            "is running; stop it and remove"
        } else {
            "will go with"
        };
        ui.ask(format_args!(
            "machine {} {doing} all its data. Remove it? [y/N] ",
            machine.name()
        ));
        let mut answer = String::new();
        io::stdin().read_line(&mut answer)?;
        if !matches!(answer.trim(), "y" | "Y" | "yes") {
            ui.talk("nothing was removed");
            report(args, &machine, false, ui)?;
            return Ok(Exit::FAILURE);
        }
        force = true;
    }
    let removed = machine.remove(force, &Silent).await?;
    let name = machine.name();
    if !args.json {
        ui.talk(if removed {
            format!("machine {name} is removed")
        } else {
            format!("there is no machine {name}")
        });
    }
    report(args, &machine, removed, ui)?;
    Ok(Exit::OK)
}

fn report(args: &RmArgs, machine: &Machine, removed: bool, ui: &Ui) -> io::Result<()> {
    if args.json {
        ui.json(&json!({ "name": machine.name().as_str(), "removed": removed }))?;
    }
    Ok(())
}
