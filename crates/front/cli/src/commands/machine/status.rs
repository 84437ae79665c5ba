//! `forkd machine status`: prints the state of a machine.

use forkd_machine::{State, Status};

use super::machine;
use crate::args::machine::StatusArgs;
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd machine status`.
pub async fn run(args: &StatusArgs, ui: &Ui) -> CliResult {
    let status = machine(&args.machine)?.status().await?;
    if args.json {
        ui.json(&status)?;
    } else {
        for (label, text) in rows(&status) {
            ui.line(format_args!("{label:<14}{text}"))?;
        }
    }
    Ok(if status.state == State::Running {
        Exit::OK
    } else {
        Exit::FAILURE
    })
}

fn rows(status: &Status) -> Vec<(&'static str, String)> {
    let mut rows = vec![("machine", status.name.clone()), ("state", state(status))];
    if let Some(run) = &status.run {
        rows.extend([
            (
                "acceleration",
                format!("{} ({})", run.expectation, run.accel_reason),
            ),
            ("clock", run.clock.to_string()),
            ("cpus", run.cpus.to_string()),
            ("memory", forkd_types::MiB(run.memory_mib).to_string()),
            (
                "disk",
                format!(
                    "{} ({} MiB used on this host)",
                    forkd_types::MiB(run.disk_mib),
                    status.disk_used_mib
                ),
            ),
            ("daemon", daemon(run.daemon, run.port)),
            ("uptime", uptime(run.uptime_s)),
        ]);
        if let Some(boot_ms) = run.boot_ms {
            rows.push(("boot", format!("{:.1} s", boot_ms as f64 / 1000.0)));
        }
        if let Some(kernel) = &run.kernel {
            rows.push(("kernel", kernel.clone()));
        }
        rows.extend([
            ("image", run.image.clone()),
            (
                "qemu",
                format!(
                    "{}, pid {}, agent port {}",
                    run.qemu, run.pid, run.agent_port
                ),
            ),
        ]);
    }
    rows.push(("files", status.folder.display().to_string()));
    rows
}

fn state(status: &Status) -> String {
    let advice = match status.state {
        State::Absent => " (make one with `forkd machine start`)",
        State::Paused => " (the disk of this host is full: free some space, then start it)",
        State::Unresponsive => " (look at `forkd machine logs`)",
        State::Stopped | State::Starting | State::Running => "",
    };
    format!("{}{advice}", status.state.as_str())
}

fn daemon(runs: Option<bool>, port: u16) -> String {
    match runs {
        Some(true) => format!("http://127.0.0.1:{port}"),
        Some(false) => format!("not running; its port is 127.0.0.1:{port}"),
        None => format!("unknown; its port is 127.0.0.1:{port}"),
    }
}

fn uptime(seconds: u64) -> String {
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, m, s) => format!("{m} min {s} s"),
        (h, m, _) => format!("{h} h {m} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forkd_machine::{Accel, Clock, RunStatus};

    fn status(state: State, run: Option<RunStatus>) -> String {
        let status = Status {
            name: "default".to_owned(),
            state,
            folder: "/state/default".into(),
            console: "/state/default/console.log".into(),
            disk_used_mib: 70,
            run,
        };
        rows(&status)
            .iter()
            .map(|(label, text)| format!("{label:<14}{text}\n"))
            .collect()
    }

    #[test]
    fn a_running_machine() {
        let run = RunStatus {
            accel: Accel::Tcg,
            accel_reason: "there is no /dev/kvm".to_owned(),
            expectation: Accel::Tcg.expectation(),
            clock: Clock::Instructions,
            cpus: 2,
            memory_mib: 8192,
            disk_mib: 20480,
            port: 8889,
            agent_port: 40001,
            pid: 7,
            qemu: "10.0.2".to_owned(),
            image: "abc".to_owned(),
            uptime_s: 3725,
            boot_ms: Some(7421),
            kernel: Some("6.12.1".to_owned()),
            daemon: Some(true),
        };
        insta::assert_snapshot!(status(State::Running, Some(run)), @r"
        machine       default
        state         running
        acceleration  software emulation: correct, about 15 times slower (there is no /dev/kvm)
        clock         instructions
        cpus          2
        memory        8 GiB
        disk          20 GiB (70 MiB used on this host)
        daemon        http://127.0.0.1:8889
        uptime        1 h 2 min
        boot          7.4 s
        kernel        6.12.1
        image         abc
        qemu          10.0.2, pid 7, agent port 40001
        files         /state/default
        ");
    }

    #[test]
    fn a_machine_that_is_not_there() {
        insta::assert_snapshot!(status(State::Absent, None), @r"
        machine       default
        state         absent (make one with `forkd machine start`)
        files         /state/default
        ");
    }
}
