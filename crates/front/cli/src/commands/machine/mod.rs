//! `forkd machine`: one file per subcommand, short ones here.

mod exec;
mod logs;
mod rm;
mod start;
mod status;

use anyhow::anyhow;
use forkd_machine::dirs::Dirs;
use forkd_machine::{Machine, MachineError, Silent, Stopped};
use serde_json::json;

use crate::args::machine::{
    CopyEnd, CpArgs, LsArgs, MachineArgs, MachineCommand, NameArg, StopArgs, SyncArgs,
};
use crate::error::{CliError, CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd machine`.
pub fn run(args: MachineArgs, ui: &Ui) -> CliResult {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let result = runtime.block_on(async {
        match args.command {
            MachineCommand::Start(args) => start::run(&args, ui).await,
            MachineCommand::Stop(args) => stop(&args, ui).await,
            MachineCommand::Status(args) => status::run(&args, ui).await,
            MachineCommand::Ls(args) => ls(&args, ui).await,
            MachineCommand::Exec(args) => exec::run(args, ui).await,
            MachineCommand::Shell(args) => exec::shell(&args, ui).await,
            MachineCommand::Sync(args) => sync(&args, ui).await,
            MachineCommand::Cp(args) => cp(&args, ui).await,
            MachineCommand::Logs(args) => logs::run(&args, ui).await,
            MachineCommand::Rm(args) => rm::run(&args, ui).await,
        }
    });
    // A pending read of standard input must not delay the exit.
    runtime.shutdown_background();
    result
}

impl From<MachineError> for CliError {
    fn from(error: MachineError) -> Self {
        let hint = error.hint();
        Self::new(error.into(), hint)
    }
}

fn machine(args: &NameArg) -> Result<Machine, CliError> {
    Ok(Machine::named(args.name.clone())?)
}

async fn stop(args: &StopArgs, ui: &Ui) -> CliResult {
    let machine = machine(&args.machine)?;
    let stopped = machine.stop(&Silent).await?;
    if args.json {
        ui.json(&json!({ "name": machine.name().as_str(), "stopped": stopped }))?;
    } else {
        let name = machine.name();
        ui.talk(match stopped {
            Stopped::NotRunning => format!("machine {name} is not running"),
            Stopped::Clean => format!("machine {name} is stopped"),
            Stopped::Quit => format!("machine {name} did not answer and was switched off"),
            Stopped::Killed => format!("machine {name} did not answer and was killed"),
        });
    }
    Ok(Exit::OK)
}

async fn ls(args: &LsArgs, ui: &Ui) -> CliResult {
    let dirs = Dirs::of_user().ok_or(MachineError::NoHome)?;
    let mut all = Vec::new();
    for machine in Machine::list(&dirs)? {
        all.push(machine.status().await?);
    }
    if args.json {
        ui.json(&all)?;
    } else if all.is_empty() {
        ui.talk("no machines");
    } else {
        for status in all {
            ui.line(format_args!("{}\t{}", status.name, status.state.as_str()))?;
        }
    }
    Ok(Exit::OK)
}

async fn sync(args: &SyncArgs, ui: &Ui) -> CliResult {
    let copied = machine(&args.machine)?.sync(&Silent).await?;
    if args.json {
        ui.json(&copied)?;
    } else if copied.is_empty() {
        ui.talk("the programs in the machine are up to date");
    } else {
        ui.talk(format_args!("copied {}", copied.join(", ")));
    }
    Ok(Exit::OK)
}

async fn cp(args: &CpArgs, ui: &Ui) -> CliResult {
    let session = machine(&args.machine)?.connect().await?;
    match (CopyEnd::parse(&args.from), CopyEnd::parse(&args.to)) {
        (CopyEnd::Host(from), CopyEnd::Machine(to)) => session.push(&from, &to).await?,
        (CopyEnd::Machine(from), CopyEnd::Host(to)) => session.pull(&from, &to).await?,
        _ => {
            return Err(CliError::from(anyhow!(
                "one of the two paths must be in the machine, the other on this host"
            ))
            .with_hint(
                "write a path in the machine with a leading colon: `forkd machine cp FILE :/tmp/`",
            ));
        }
    }
    if args.json {
        ui.json(&json!({ "from": args.from, "to": args.to }))?;
    }
    Ok(Exit::OK)
}
