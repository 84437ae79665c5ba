//! `forkd machine start`: starts a machine and reports progress.

use std::time::Duration;

use forkd_machine::{MachineError, Progress, StartOptions, Started, Step};
use tokio::signal::unix::{SignalKind, signal};

use super::machine;
use crate::args::machine::StartArgs;
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd machine start`.
pub async fn run(args: &StartArgs, ui: &Ui) -> CliResult {
    let machine = machine(&args.machine)?;
    let options = StartOptions {
        cpus: args.cpus,
        memory: args.memory,
        disk: args.disk,
        accel: args.accel,
        clock: args.clock,
        api_port: args.port,
    };
    let talk = Talk { ui: *ui };
    let (mut interrupt, mut terminate, mut hang_up) = (
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
        signal(SignalKind::hangup())?,
    );
    // Dropping the future stops a machine that is still starting.
    let started = tokio::select! {
        started = machine.start(&options, &talk) => started?,
        _ = interrupt.recv() => return Err(MachineError::Interrupted.into()),
        _ = terminate.recv() => return Err(MachineError::Interrupted.into()),
        _ = hang_up.recv() => return Err(MachineError::Interrupted.into()),
    };
    if args.json {
        ui.json(&started)?;
    } else {
        report(ui, machine.name().as_str(), &started);
    }
    Ok(Exit::OK)
}

fn report(ui: &Ui, name: &str, started: &Started) {
    if !started.ignored.is_empty() {
        ui.talk(format_args!(
            "note: the machine runs already; {} needs `forkd machine stop` first",
            started.ignored.join(", ")
        ));
    }
    let how = if started.already_running {
        "runs already"
    } else {
        "runs"
    };
    let port = started.api_port;
    ui.talk(if started.daemon {
        format!("machine {name} {how}; the daemon is at http://127.0.0.1:{port}")
    } else {
        format!("machine {name} {how}; it has no daemon (its port would be 127.0.0.1:{port})")
    });
}

/// Prints the progress of a start.
struct Talk {
    ui: Ui,
}

impl Progress for Talk {
    fn step(&self, step: &Step) {
        match step {
            Step::WaitingForOther => {
                self.ui
                    .talk("waiting for another forkd process that starts or stops this machine …");
            }
            Step::Image => self.ui.aside("looking for the machine image …"),
            Step::Disk => {}
            Step::Booting { expectation } => {
                self.ui.talk(format_args!("booting ({expectation}) …"))
            }
            Step::StillBooting { after } => self.ui.talk(format_args!(
                "still booting after {}; `forkd machine logs` shows its console",
                seconds(*after)
            )),
            Step::Answered { after } => {
                self.ui.talk(format_args!(
                    "the machine answered after {}",
                    seconds(*after)
                ));
            }
            Step::Programs { count } => {
                self.ui
                    .aside(format_args!("copying {count} programs into the machine …"));
            }
            Step::Daemon => self.ui.aside("starting the daemon …"),
            Step::Resumed => self.ui.talk("the machine was paused and is running again"),
        }
    }

    fn builder(&self, line: &str) {
        self.ui.aside(format_args!("  {line}"));
    }
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}
