//! Scenarios with real guests.
//!
//! This program runs on a KVM host: on a developer's own, or in the machine. It takes the arguments of an
//! ordinary Rust test program (`--list`, a filter, `--test-threads`). The same binary is copied into guests
//! and run there as `forkd-e2e guest NAME ARGS…`, so both halves of a scenario stand in one file.

mod guest_half;
mod scenario;
mod scenarios;
mod support;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    let mut args = std::env::args();
    if args.nth(1).as_deref() == Some("guest") {
        return guest_half::run(args);
    }
    let arguments = Arguments::from_args();
    let trials: Vec<Trial> = scenarios::all().into_iter().map(scenario::trial).collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    println!(
        "{} passed, {} failed",
        conclusion.num_passed, conclusion.num_failed
    );
    conclusion.exit_code()
}
