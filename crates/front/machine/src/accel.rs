//! Chooses between hardware acceleration and software emulation.
//!
//! [`AccelChoice`] is the request, [`Accel`] the decision. KVM is used only if the probe finds it native and
//! nesting is on: the machine has to run VMs itself.

use std::fmt;
use std::str::FromStr;

use forkd_probe::{Report, Verdict};
use serde::{Deserialize, Serialize};

use crate::error::MachineError;

/// The acceleration that the user requested.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AccelChoice {
    /// KVM where the host's is native and nesting is on, else emulation.
    #[default]
    Auto,
    /// KVM, or an error.
    Kvm,
    Tcg,
}

/// The acceleration that a machine runs with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Accel {
    /// The host's KVM.
    Kvm,
    /// QEMU's software emulation.
    Tcg,
}

impl Accel {
    /// A sentence for users about the speed.
    #[must_use]
    pub fn expectation(self) -> &'static str {
        match self {
            Self::Kvm => "hardware acceleration: close to the speed of the host",
            Self::Tcg => "software emulation: correct, about 15 times slower",
        }
    }

    /// QEMU's name of the accelerator.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The text does not name an acceleration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an acceleration: write auto, kvm or tcg")]
pub struct InvalidAccel {
    pub text: String,
}

impl FromStr for AccelChoice {
    type Err = InvalidAccel;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "kvm" => Ok(Self::Kvm),
            "tcg" => Ok(Self::Tcg),
            _ => Err(InvalidAccel {
                text: text.chars().take(32).collect(),
            }),
        }
    }
}

/// Returns the acceleration and the reason for it. Runs the probe only if its result matters.
pub(crate) fn choose(
    choice: AccelChoice,
    probe: impl FnOnce() -> Report,
) -> Result<(Accel, String), MachineError> {
    if choice == AccelChoice::Tcg {
        return Ok((Accel::Tcg, "asked for".to_owned()));
    }
    let report = probe();
    match unsuitable(&report) {
        None => Ok((Accel::Kvm, "KVM is native and nesting is on".to_owned())),
        Some(reason) if choice == AccelChoice::Auto => Ok((Accel::Tcg, reason)),
        Some(reason) => Err(MachineError::NoKvm { reason }),
    }
}

fn unsuitable(report: &Report) -> Option<String> {
    match report.verdict {
        Verdict::Native if report.nesting == Some(true) => None,
        Verdict::Native => {
            Some("KVM is native, but nesting is off, so that no VM could run inside".to_owned())
        }
        _ => Some(
            report
                .reason
                .clone()
                .unwrap_or_else(|| report.verdict.as_str().to_owned()),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(verdict: Verdict, nesting: Option<bool>) -> Report {
        Report {
            verdict,
            ns_per_iteration: None,
            exit_ns: None,
            nesting,
            elapsed_us: 0,
            reason: Some("because".to_owned()),
        }
    }

    #[test]
    fn hardware_only_where_guests_can_nest() {
        let auto = |verdict, nesting| {
            choose(AccelChoice::Auto, || report(verdict, nesting))
                .unwrap()
                .0
        };
        assert_eq!(auto(Verdict::Native, Some(true)), Accel::Kvm);
        assert_eq!(auto(Verdict::Native, Some(false)), Accel::Tcg);
        assert_eq!(auto(Verdict::Interpreting, Some(true)), Accel::Tcg);
        assert_eq!(auto(Verdict::Absent, None), Accel::Tcg);
    }

    #[test]
    fn kvm_that_is_not_there_is_an_error_with_the_reason() {
        let error = choose(AccelChoice::Kvm, || report(Verdict::Forbidden, None)).unwrap_err();
        assert!(error.to_string().ends_with("because"), "{error}");
    }

    #[test]
    fn emulation_needs_no_probe() {
        let (accel, _) = choose(AccelChoice::Tcg, || panic!("probed")).unwrap();
        assert_eq!(accel, Accel::Tcg);
    }
}
