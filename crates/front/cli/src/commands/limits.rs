//! `forkd limits`: shows or changes the limits of a live sandbox.

use forkd_api::{LimitsRequest, UpdateSandbox};

use crate::args::LimitsArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd limits`.
pub fn run(args: &LimitsArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    let given = args.limits.request();
    block_on(async {
        let mut info = client.sandbox(&args.id).await.map_err(failed)?;
        if args.clear || given != LimitsRequest::default() {
            // The daemon replaces all limits by those of the request.
            let before = if args.clear {
                LimitsRequest::default()
            } else {
                info.limits
            };
            let request = UpdateSandbox {
                limits: Some(over(before, given)),
                ..UpdateSandbox::default()
            };
            info = client.update(&args.id, &request).await.map_err(failed)?;
        }
        if args.json {
            ui.json(&info.limits)?;
        } else {
            ui.line(show(&info.limits))?;
        }
        Ok(Exit::OK)
    })
}

/// The given limits over those before.
fn over(before: LimitsRequest, given: LimitsRequest) -> LimitsRequest {
    LimitsRequest {
        memory_mib: given.memory_mib.or(before.memory_mib),
        cpus: given.cpus.or(before.cpus),
        cpu_weight: given.cpu_weight.or(before.cpu_weight),
        pids: given.pids.or(before.pids),
        io_bytes_per_sec: given.io_bytes_per_sec.or(before.io_bytes_per_sec),
        io_ops_per_sec: given.io_ops_per_sec.or(before.io_ops_per_sec),
    }
}

/// One line per limit, named as the flag that sets it.
fn show(limits: &LimitsRequest) -> String {
    let text = |value: Option<String>| value.unwrap_or_else(|| "none".to_owned());
    let number = |value: Option<u64>| text(value.map(|value| value.to_string()));
    let lines = [
        (
            "memory-limit",
            text(limits.memory_mib.map(|mib| format!("{mib}M"))),
        ),
        (
            "cpus",
            text(limits.cpus.map(|cpus| f64::from(cpus).to_string())),
        ),
        ("cpu-weight", number(limits.cpu_weight)),
        ("pids-limit", number(limits.pids)),
        ("io-bytes-per-sec", number(limits.io_bytes_per_sec)),
        ("io-ops-per-sec", number(limits.io_ops_per_sec)),
    ];
    lines
        .map(|(name, value)| format!("{name}: {value}"))
        .join("\n")
}
