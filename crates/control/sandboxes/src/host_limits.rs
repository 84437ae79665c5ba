//! Limits on the host resources of one sandbox, as requests give them and records keep them.
//!
//! `forkd-spawn` keeps them with cgroup v2. It refuses a limit whose controller the host lacks, and names the remedy.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use forkd_api::{Cpus, ErrorCode, Limits as CheckedLimits, LimitsRequest};
use forkd_vmm_proto::spawn::{IoLimit, Limits};
use serde::{Deserialize, Serialize};
use thiserror::Error as ThisError;

use crate::error::Error;

/// Limits beside the memory limit. A missing value is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostLimits {
    /// CPU time in thousandths of one CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_millis: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_weight: Option<u16>,
    /// Threads and processes of the VMM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pids: Option<u32>,
    /// Bytes per second, for reads and for writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_bytes_per_sec: Option<u64>,
    /// Operations per second, for reads and for writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_ops_per_sec: Option<u64>,
}

impl From<CheckedLimits> for HostLimits {
    /// The memory limit is kept beside. The ranges of the checked type fit.
    fn from(limits: CheckedLimits) -> Self {
        Self {
            cpu_millis: limits.cpus.map(Cpus::thousandths),
            cpu_weight: limits.cpu_weight.and_then(|weight| weight.try_into().ok()),
            pids: limits.pids.and_then(|pids| pids.try_into().ok()),
            io_bytes_per_sec: limits.io_bytes_per_sec,
            io_ops_per_sec: limits.io_ops_per_sec,
        }
    }
}

/// Why the use of the disk cannot be limited.
#[derive(Debug, ThisError)]
#[error(
    "disk limits need the data directory on a block device of its own, and {path} is not: {reason}"
)]
pub struct NoDevice {
    path: String,
    reason: String,
}

impl HostLimits {
    /// The limits for `forkd-spawn`, with the disk that holds `data`.
    pub fn for_host(&self, memory_mib: Option<u64>, data: &Path) -> Result<Limits, NoDevice> {
        Ok(Limits {
            memory_bytes: memory_mib.map(|mib| mib.saturating_mul(1 << 20)),
            cpu_millis: self.cpu_millis,
            cpu_weight: self.cpu_weight,
            io: self.io(data)?.into_iter().collect(),
            pids: self.pids,
        })
    }

    /// As the API shows them.
    pub fn as_shown(&self, memory_mib: Option<u64>) -> LimitsRequest {
        LimitsRequest {
            memory_mib,
            cpus: self.cpu_millis.map(Cpus::from_thousandths),
            cpu_weight: self.cpu_weight.map(u64::from),
            pids: self.pids.map(u64::from),
            io_bytes_per_sec: self.io_bytes_per_sec,
            io_ops_per_sec: self.io_ops_per_sec,
        }
    }

    fn io(&self, data: &Path) -> Result<Option<IoLimit>, NoDevice> {
        if self.io_bytes_per_sec.is_none() && self.io_ops_per_sec.is_none() {
            return Ok(None);
        }
        let (major, minor) = disk_of(data).map_err(|reason| NoDevice {
            path: data.display().to_string(),
            reason,
        })?;
        Ok(Some(IoLimit {
            major,
            minor,
            read_bytes: self.io_bytes_per_sec,
            write_bytes: self.io_bytes_per_sec,
            read_ops: self.io_ops_per_sec,
            write_ops: self.io_ops_per_sec,
        }))
    }
}

impl From<NoDevice> for Error {
    fn from(error: NoDevice) -> Self {
        Self::Refused {
            code: ErrorCode::Unsupported,
            message: error.to_string(),
            hint: Some(
                "leave the disk limits out, or move the data directory (--data-dir)".to_owned(),
            ),
        }
    }
}

/// The disk that a path is on. The kernel limits whole disks, not partitions.
fn disk_of(path: &Path) -> Result<(u32, u32), String> {
    let number = fs::metadata(path).map_err(|error| error.to_string())?.dev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    if major == 0 {
        return Err("its file system has no single block device".to_owned());
    }
    let entry = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}"))
        .map_err(|error| format!("block device {major}:{minor}: {error}"))?;
    if !entry.join("partition").exists() {
        return Ok((major, minor));
    }
    let disk = entry.parent().unwrap_or(&entry).join("dev");
    let text = fs::read_to_string(&disk).map_err(|error| error.to_string())?;
    let parsed = text
        .trim()
        .split_once(':')
        .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    parsed.ok_or_else(|| format!("{} is invalid", disk.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_reaches_the_host() {
        let limits = HostLimits {
            cpu_millis: Some(1500),
            cpu_weight: Some(7),
            pids: Some(64),
            ..HostLimits::default()
        };
        let host = limits.for_host(Some(3), Path::new("/")).unwrap();
        assert_eq!(host.memory_bytes, Some(3 << 20));
        assert_eq!(host.cpu_millis, Some(1500));
        assert_eq!(host.cpu_weight, Some(7));
        assert_eq!(host.pids, Some(64));
        assert!(host.io.is_empty());
    }

    #[test]
    fn a_disk_limit_without_a_disk_is_refused_with_the_reason() {
        let limits = HostLimits {
            io_ops_per_sec: Some(5),
            ..HostLimits::default()
        };
        let error = limits.for_host(None, Path::new("/proc")).unwrap_err();
        assert!(error.to_string().contains("/proc"), "{error}");
    }
}
