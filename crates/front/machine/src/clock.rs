//! The clock of a machine: the host's time, or executed instructions.
//!
//! With [`Clock::Instructions`] QEMU counts 2 ns for each instruction that the machine executes, guests in the
//! machine included. The same work takes the same time, whatever the load of the host. QEMU can count only if
//! it emulates one CPU, so the combination with KVM or with more CPUs is refused.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::accel::AccelChoice;
use crate::error::MachineError;

/// The clock that the kernel of a machine reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Clock {
    /// The time of the host.
    #[default]
    Host,
    /// Executed instructions, 2 ns each. While all CPUs are idle, the clock follows the host's.
    Instructions,
}

impl Clock {
    /// The name on the command line, in JSON, and in the argument `forkd.clock=` of the machine's kernel.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Instructions => "instructions",
        }
    }

    /// Checks that a machine with these settings can have this clock. Returns the acceleration to ask for.
    pub(crate) fn check(
        self,
        accel: AccelChoice,
        cpus: Option<u32>,
    ) -> Result<AccelChoice, MachineError> {
        if self == Self::Host {
            return Ok(accel);
        }
        if accel == AccelChoice::Kvm {
            return Err(MachineError::ClockNeedsEmulation);
        }
        match cpus {
            Some(cpus) if cpus > 1 => Err(MachineError::ClockNeedsOneCpu { cpus }),
            _ => Ok(AccelChoice::Tcg),
        }
    }
}

impl fmt::Display for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The text does not name a clock.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a clock: write host or instructions")]
pub struct InvalidClock {
    pub text: String,
}

impl FromStr for Clock {
    type Err = InvalidClock;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "host" => Ok(Self::Host),
            "instructions" => Ok(Self::Instructions),
            _ => Err(InvalidClock {
                text: text.chars().take(32).collect(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_counted_on_one_emulated_cpu_only() {
        let check = |accel, cpus| Clock::Instructions.check(accel, cpus);
        assert_eq!(check(AccelChoice::Auto, None).unwrap(), AccelChoice::Tcg);
        assert_eq!(check(AccelChoice::Tcg, Some(1)).unwrap(), AccelChoice::Tcg);
        assert!(matches!(
            check(AccelChoice::Auto, Some(2)),
            Err(MachineError::ClockNeedsOneCpu { cpus: 2 })
        ));
        assert!(matches!(
            check(AccelChoice::Kvm, None),
            Err(MachineError::ClockNeedsEmulation)
        ));
    }

    #[test]
    fn the_host_clock_allows_everything() {
        let checked = Clock::Host.check(AccelChoice::Kvm, Some(8)).unwrap();
        assert_eq!(checked, AccelChoice::Kvm);
    }

    #[test]
    fn names_are_read_back() {
        for clock in [Clock::Host, Clock::Instructions] {
            assert_eq!(clock.as_str().parse(), Ok(clock));
        }
        let error = "tsc".parse::<Clock>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "\"tsc\" is not a clock: write host or instructions"
        );
    }
}
