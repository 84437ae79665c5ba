//! Limits on the host resources that one sandbox may use.
//!
//! [`LimitsRequest`] is the wire type. [`Limits`] is the checked type: every number is in the range that cgroup v2 and the
//! VMM accept, and [`CreateSandboxes::checked_limits`] is the only way to get one. A daemon refuses a limit that it cannot
//! enforce. It never ignores one: [`Limits::requested`] lists the limits to compare with those it supports.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use utoipa::ToSchema;

use crate::CreateSandboxes;

const MEMORY_MIB: RangeInclusive<u64> = 16..=1 << 24;
/// The range of `cpu.weight` in cgroup v2.
const CPU_WEIGHT: RangeInclusive<u64> = 1..=10_000;
/// A VMM needs a thread for each vCPU and a few more. The upper end is the kernel's own maximum.
const PIDS: RangeInclusive<u64> = 16..=4_194_304;
/// Below one sector per second a disk makes no progress.
const IO_BYTES: RangeInclusive<u64> = 512..=1 << 40;
const IO_OPS: RangeInclusive<u64> = 1..=1_000_000_000;

/// Limits on each sandbox of a request *(extension)*. A daemon that cannot enforce one refuses the request with
/// `unsupported`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LimitsRequest {
    /// Host memory in MiB. Pages shared with the snapshot do not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 16, maximum = 16777216)]
    pub memory_mib: Option<u64>,
    /// Host processors, such as 0.5 or 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<f64>, minimum = 0.01, maximum = 1024.0)]
    pub cpus: Option<Cpus>,
    /// Share of the processors when they are contended; 100 is the share of a process without a weight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 10000)]
    pub cpu_weight: Option<u64>,
    /// Threads and processes of the VMM on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 16, maximum = 4194304)]
    pub pids: Option<u64>,
    /// Bytes per second that each disk reads and writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 512)]
    pub io_bytes_per_sec: Option<u64>,
    /// Operations per second of each disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000000000)]
    pub io_ops_per_sec: Option<u64>,
}

impl LimitsRequest {
    /// Whether the request limits nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A number of processors, 0.01 to 1024, in thousandths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Cpus(u32);

impl Cpus {
    /// Thousandths of a processor.
    pub fn thousandths(self) -> u32 {
        self.0
    }
}

impl Cpus {
    /// A number of thousandths that was a [`Cpus`] before.
    pub fn from_thousandths(thousandths: u32) -> Self {
        Self(thousandths.clamp(10, 1_024_000))
    }
}

impl TryFrom<f64> for Cpus {
    type Error = InvalidCpus;

    fn try_from(number: f64) -> Result<Self, Self::Error> {
        if (0.01..=1024.0).contains(&number) {
            Ok(Self((number * 1000.0).round() as u32))
        } else {
            Err(InvalidCpus {
                text: number.to_string(),
            })
        }
    }
}

impl From<Cpus> for f64 {
    fn from(cpus: Cpus) -> Self {
        Self::from(cpus.0) / 1000.0
    }
}

impl FromStr for Cpus {
    type Err = InvalidCpus;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidCpus {
            text: text.chars().take(32).collect(),
        };
        let number: f64 = text.parse().map_err(|_| invalid())?;
        Self::try_from(number).map_err(|_| invalid())
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f64::from(*self).fmt(f)
    }
}

/// Why a number of processors is rejected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text:?} is not a number of CPUs: give 0.01 to 1024")]
pub struct InvalidCpus {
    /// The rejected value, cut to 32 characters.
    pub text: String,
}

/// Why the limits of a request are rejected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InvalidLimits {
    /// A number outside of its range.
    #[error("{field} is {value}: give {min} to {max}")]
    OutOfRange {
        /// The field of the request, with its parents.
        field: String,
        /// The rejected value.
        value: u64,
        /// The smallest valid value.
        min: u64,
        /// The largest valid value.
        max: u64,
    },
    /// Two memory limits that differ.
    #[error("memory_limit_mib is {old} and limits.memory_mib is {new}: give one of them")]
    Contradiction {
        /// The value of `memory_limit_mib`.
        old: u64,
        /// The value of `limits.memory_mib`.
        new: u64,
    },
}

/// A kind of limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LimitKind {
    Memory,
    Cpus,
    CpuWeight,
    Pids,
    IoBytes,
    IoOps,
}

impl LimitKind {
    /// The name of the field in [`LimitsRequest`].
    pub fn field(self) -> &'static str {
        match self {
            Self::Memory => "memory_mib",
            Self::Cpus => "cpus",
            Self::CpuWeight => "cpu_weight",
            Self::Pids => "pids",
            Self::IoBytes => "io_bytes_per_sec",
            Self::IoOps => "io_ops_per_sec",
        }
    }
}

/// Limits whose numbers are in range.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Host memory in MiB.
    pub memory_mib: Option<u64>,
    /// Time of host processors.
    pub cpus: Option<Cpus>,
    /// Share of the processors when they are contended.
    pub cpu_weight: Option<u64>,
    /// Threads and processes of the VMM.
    pub pids: Option<u64>,
    /// Bytes per second of each disk.
    pub io_bytes_per_sec: Option<u64>,
    /// Operations per second of each disk.
    pub io_ops_per_sec: Option<u64>,
}

impl Limits {
    /// The limits that are set.
    pub fn requested(&self) -> impl Iterator<Item = LimitKind> {
        [
            (LimitKind::Memory, self.memory_mib.is_some()),
            (LimitKind::Cpus, self.cpus.is_some()),
            (LimitKind::CpuWeight, self.cpu_weight.is_some()),
            (LimitKind::Pids, self.pids.is_some()),
            (LimitKind::IoBytes, self.io_bytes_per_sec.is_some()),
            (LimitKind::IoOps, self.io_ops_per_sec.is_some()),
        ]
        .into_iter()
        .filter_map(|(kind, set)| set.then_some(kind))
    }
}

impl CreateSandboxes {
    /// Checks `limits`, and `memory_limit_mib` as the older name of one of them.
    pub fn checked_limits(&self) -> Result<Limits, InvalidLimits> {
        let old = in_range("memory_limit_mib", self.memory_limit_mib, MEMORY_MIB)?;
        let limits = self.limits.checked()?;
        if let (Some(old), Some(new)) = (old, limits.memory_mib)
            && old != new
        {
            return Err(InvalidLimits::Contradiction { old, new });
        }
        Ok(Limits {
            memory_mib: limits.memory_mib.or(old),
            ..limits
        })
    }
}

impl LimitsRequest {
    /// Checks that every number is in range.
    pub fn checked(&self) -> Result<Limits, InvalidLimits> {
        let wanted = self;
        Ok(Limits {
            memory_mib: in_range("limits.memory_mib", wanted.memory_mib, MEMORY_MIB)?,
            cpus: wanted.cpus,
            cpu_weight: in_range("limits.cpu_weight", wanted.cpu_weight, CPU_WEIGHT)?,
            pids: in_range("limits.pids", wanted.pids, PIDS)?,
            io_bytes_per_sec: in_range(
                "limits.io_bytes_per_sec",
                wanted.io_bytes_per_sec,
                IO_BYTES,
            )?,
            io_ops_per_sec: in_range("limits.io_ops_per_sec", wanted.io_ops_per_sec, IO_OPS)?,
        })
    }
}

fn in_range(
    field: &str,
    value: Option<u64>,
    range: RangeInclusive<u64>,
) -> Result<Option<u64>, InvalidLimits> {
    match value {
        Some(value) if !range.contains(&value) => Err(InvalidLimits::OutOfRange {
            field: field.to_owned(),
            value,
            min: *range.start(),
            max: *range.end(),
        }),
        fits => Ok(fits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(json: &str) -> CreateSandboxes {
        serde_json::from_str(json).unwrap()
    }

    fn rejected(json: &str) -> String {
        request(json).checked_limits().unwrap_err().to_string()
    }

    #[test]
    fn limits_are_read_and_named() {
        let limits = request(
            r#"{"snapshot_tag": "x", "limits": {"memory_mib": 512, "cpus": 1.5, "cpu_weight": 50, "pids": 64,
                "io_bytes_per_sec": 1048576, "io_ops_per_sec": 100}}"#,
        )
        .checked_limits()
        .unwrap();
        assert_eq!(limits.memory_mib, Some(512));
        assert_eq!(limits.cpus.unwrap().thousandths(), 1500);
        let names: Vec<&str> = limits.requested().map(LimitKind::field).collect();
        assert_eq!(
            names,
            [
                "memory_mib",
                "cpus",
                "cpu_weight",
                "pids",
                "io_bytes_per_sec",
                "io_ops_per_sec"
            ]
        );
        let none = request(r#"{"snapshot_tag": "x"}"#)
            .checked_limits()
            .unwrap();
        assert_eq!(none.requested().count(), 0);
    }

    #[test]
    fn the_older_name_of_the_memory_limit_counts() {
        let old = request(r#"{"snapshot_tag": "x", "memory_limit_mib": 300}"#);
        assert_eq!(old.checked_limits().unwrap().memory_mib, Some(300));
        assert_eq!(
            rejected(
                r#"{"snapshot_tag": "x", "memory_limit_mib": 300, "limits": {"memory_mib": 400}}"#
            ),
            "memory_limit_mib is 300 and limits.memory_mib is 400: give one of them"
        );
    }

    #[test]
    fn a_number_out_of_range_is_named_with_its_range() {
        assert_eq!(
            rejected(r#"{"snapshot_tag": "x", "limits": {"memory_mib": 15}}"#),
            "limits.memory_mib is 15: give 16 to 16777216"
        );
        for field in ["cpu_weight", "pids", "io_bytes_per_sec", "io_ops_per_sec"] {
            for value in [0, u64::MAX] {
                let text = rejected(&format!(
                    r#"{{"snapshot_tag": "x", "limits": {{"{field}": {value}}}}}"#
                ));
                assert!(
                    text.starts_with(&format!("limits.{field} is {value}: ")),
                    "{text}"
                );
            }
        }
    }

    #[test]
    fn cpus_that_are_no_number_or_none_at_all_are_rejected() {
        for text in ["0", "0.001", "-1", "1025", "NaN", "inf", "two", ""] {
            assert!(text.parse::<Cpus>().is_err(), "{text}");
        }
        assert_eq!("0.5".parse::<Cpus>().unwrap().thousandths(), 500);
        assert_eq!("2".parse::<Cpus>().unwrap().to_string(), "2");
        let read = serde_json::from_str::<Cpus>("0");
        assert!(read.unwrap_err().to_string().contains("0.01 to 1024"));
    }
}
