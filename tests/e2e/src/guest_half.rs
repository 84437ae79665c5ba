//! The parts of scenarios that run in a guest.
//!
//! The test program is copied into the guest and started there with `guest NAME`.

use std::process::ExitCode;

/// Runs the guest part that the first argument names.
pub fn run(mut args: impl Iterator<Item = String>) -> ExitCode {
    let name = args.next().unwrap_or_default();
    let rest: Vec<String> = args.collect();
    match crate::scenarios::guest_half(&name, &rest) {
        Some(Ok(())) => ExitCode::SUCCESS,
        Some(Err(error)) => {
            eprintln!("{name}: {error:#}");
            ExitCode::FAILURE
        }
        None => {
            eprintln!("there is no guest half named {name:?}");
            ExitCode::from(2)
        }
    }
}
