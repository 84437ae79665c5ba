//! Decides whether `/dev/kvm` can carry a guest kernel, by running guest code and timing it.
//!
//! CPU flags are not sufficient. Some hosts have a `/dev/kvm` that offers every ioctl but interprets guest kernel code
//! at hundreds of nanoseconds per instruction, so that no kernel finishes booting. The probe runs a counting loop in
//! guest kernel mode in a temporary VM and measures the time. It takes a few tens of milliseconds and cannot hang: the
//! VM lives on a thread of its own, with a watchdog.

pub mod floor;
mod guest;
mod run;

use std::ffi::CString;
use std::path::Path;
use std::time::Instant;

use serde::Serialize;

use forkd_sys::WriteTracker;

pub use forkd_sys::TrackError;
pub use guest::GuestError;
use run::Outcome;

pub const DEVICE: &str = "/dev/kvm";

/// From this cost on, one loop iteration of guest kernel code counts as interpreted. Hardware takes
/// under 1 ns, a nested guest on a software-emulated CPU around 10, an interpreter above 500.
pub const INTERPRETED_FROM_NS: f64 = 100.0;

/// The usability of `/dev/kvm`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// There is no device.
    Absent,
    /// The device exists, but this user may not open it.
    Forbidden,
    /// The device opens but cannot run a VM at all.
    Broken,
    /// Guest kernel code runs, orders of magnitude too slowly for a kernel.
    Interpreting,
    /// Guest kernel code runs at the speed of the CPU.
    Native,
}

impl Verdict {
    /// The name in the JSON output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Forbidden => "forbidden",
            Self::Broken => "broken",
            Self::Interpreting => "interpreting",
            Self::Native => "native",
        }
    }
}

/// The verdict and the measurements behind it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    pub verdict: Verdict,
    /// Cost of one iteration of a two-instruction loop in guest kernel mode.
    pub ns_per_iteration: Option<f64>,
    /// Cost of leaving the guest and entering it again.
    pub exit_ns: Option<u64>,
    /// Whether KVM offers hardware virtualisation to its guests.
    pub nesting: Option<bool>,
    /// Wall time of the probe.
    pub elapsed_us: u64,
    /// Why the verdict is not `native`, for users.
    pub reason: Option<String>,
}

/// Whether the kernel tracks writes to the memory of a VMM, with the same request that a VMM makes.
pub fn follows_writes() -> Result<(), TrackError> {
    WriteTracker::open().map(drop)
}

/// Probes `/dev/kvm` of this host.
#[must_use]
pub fn probe() -> Report {
    probe_device(Path::new(DEVICE))
}

/// Probes a KVM device at another path.
#[must_use]
pub fn probe_device(path: &Path) -> Report {
    let started = Instant::now();
    let mut report = match CString::new(path.as_os_str().as_encoded_bytes()) {
        Ok(device) => judge(path, run::run(device)),
        Err(_) => verdict(Verdict::Absent, format!("{} is not a path", path.display())),
    };
    report.elapsed_us = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
    report
}

fn judge(path: &Path, outcome: Outcome) -> Report {
    match outcome {
        Outcome::Measured(measured) => {
            let ns = measured.ns_per_iteration();
            let mut report = classify(ns);
            report.exit_ns = Some(measured.exit_ns());
            report.nesting = Some(measured.nesting);
            report
        }
        Outcome::TooSlowToMeasure { at_least_ns } => {
            let mut report = classify(at_least_ns.max(INTERPRETED_FROM_NS));
            report.reason = Some(format!(
                "guest kernel code takes more than {at_least_ns:.0} ns per loop: it is interpreted"
            ));
            report
        }
        Outcome::Stuck => verdict(
            Verdict::Broken,
            format!("creating a VM on {} did not finish in time", path.display()),
        ),
        Outcome::Failed(error) => judge_error(path, &error),
    }
}

fn judge_error(path: &Path, error: &GuestError) -> Report {
    let path = path.display();
    match error {
        GuestError::Open {
            errno: libc::ENOENT,
        } => verdict(Verdict::Absent, format!("there is no {path}")),
        // The node exists while no driver stands behind it.
        GuestError::Open {
            errno: libc::ENODEV | libc::ENXIO,
        } => verdict(
            Verdict::Absent,
            format!("no KVM driver stands behind {path}"),
        ),
        GuestError::Open {
            errno: libc::EACCES | libc::EPERM,
        } => verdict(Verdict::Forbidden, format!("this user may not open {path}")),
        other => verdict(Verdict::Broken, format!("{path}: {other}")),
    }
}

fn classify(ns_per_iteration: f64) -> Report {
    let mut report = if ns_per_iteration < INTERPRETED_FROM_NS {
        Report {
            reason: None,
            ..verdict(Verdict::Native, String::new())
        }
    } else {
        verdict(
            Verdict::Interpreting,
            format!("guest kernel code takes {ns_per_iteration:.0} ns per loop: it is interpreted"),
        )
    };
    report.ns_per_iteration = Some(ns_per_iteration);
    report
}

fn verdict(verdict: Verdict, reason: String) -> Report {
    Report {
        verdict,
        ns_per_iteration: None,
        exit_ns: None,
        nesting: None,
        elapsed_us: 0,
        reason: Some(reason),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_device_is_absent() {
        let report = probe_device(Path::new("/nonexistent/kvm"));
        assert_eq!(report.verdict, Verdict::Absent);
        assert_eq!(
            report.reason.as_deref(),
            Some("there is no /nonexistent/kvm")
        );
    }

    #[test]
    fn permission_is_told_apart_from_absence() {
        let judged = |errno| judge_error(Path::new("/dev/kvm"), &GuestError::Open { errno });
        assert_eq!(judged(libc::EACCES).verdict, Verdict::Forbidden);
        assert_eq!(judged(libc::EPERM).verdict, Verdict::Forbidden);
        assert_eq!(judged(libc::ENXIO).verdict, Verdict::Absent);
        assert_eq!(judged(libc::EBUSY).verdict, Verdict::Broken);
    }

    #[test]
    fn a_file_that_is_not_kvm_is_broken() {
        let report = probe_device(Path::new("/dev/null"));
        assert_eq!(report.verdict, Verdict::Broken);
    }

    #[test]
    fn the_clock_decides() {
        assert_eq!(classify(0.3).verdict, Verdict::Native);
        assert_eq!(classify(25.0).verdict, Verdict::Native);
        assert_eq!(classify(600.0).verdict, Verdict::Interpreting);
        assert_eq!(classify(600.0).ns_per_iteration, Some(600.0));
    }

    #[test]
    fn a_loop_that_never_ends_is_interpreting() {
        let report = judge(
            Path::new("/dev/kvm"),
            Outcome::TooSlowToMeasure {
                at_least_ns: 5000.0,
            },
        );
        assert_eq!(report.verdict, Verdict::Interpreting);
    }

    #[test]
    fn whatever_this_host_has_gets_an_answer_with_its_grounds() {
        let report = probe();
        match report.verdict {
            Verdict::Native => {
                assert!(report.ns_per_iteration.unwrap() < INTERPRETED_FROM_NS);
                assert_eq!(report.reason, None);
            }
            Verdict::Interpreting => {
                assert!(report.ns_per_iteration.unwrap() >= INTERPRETED_FROM_NS);
            }
            Verdict::Absent | Verdict::Forbidden | Verdict::Broken => {
                assert!(report.reason.is_some());
            }
        }
    }
}
