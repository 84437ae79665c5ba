//! The parts of scenarios that run in a guest.
//!
//! The test program is copied into the guest and started there with `guest NAME`.

use std::process::ExitCode;

use crate::scenarios::GUEST_HALVES;

/// A half that a scenario starts in its guest as `forkd-e2e guest NAME ARGS…`.
pub struct GuestHalf {
    /// The name on the command line.
    pub name: &'static str,
    /// The half itself, with the rest of the command line.
    pub run: fn(&[String]) -> anyhow::Result<()>,
}

/// Runs the half that the first argument names.
pub fn run(mut args: impl Iterator<Item = String>) -> ExitCode {
    let name = args.next().unwrap_or_default();
    let rest: Vec<String> = args.collect();
    let Some(half) = GUEST_HALVES.iter().find(|half| half.name == name) else {
        eprintln!("there is no guest half named {name:?}");
        return ExitCode::from(2);
    };
    match (half.run)(&rest) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error:#}");
            ExitCode::FAILURE
        }
    }
}
