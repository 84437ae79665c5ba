//! Files that describe a running machine.
//!
//! [`Record`] is stored in `machine.json`. Every file has a `schema` number, is readable by its owner only,
//! and is replaced by an atomic rename.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use forkd_types::MiB;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::accel::Accel;
use crate::clock::Clock;
use crate::error::{MachineError, RecordProblem, file};
use crate::process::ProcessIdentity;

const SCHEMA: u32 = 1;

/// A started machine, as stored in `machine.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub schema: u32,
    /// A random value per start.
    pub instance: String,
    pub qemu: ProcessIdentity,
    pub qemu_version: String,
    pub accel: Accel,
    /// Why this acceleration was chosen, for users.
    pub accel_reason: String,
    /// Absent in the record of a machine that an older version started.
    #[serde(default)]
    pub clock: Clock,
    pub cpus: u32,
    pub memory: MiB,
    pub disk: MiB,
    /// Port of 127.0.0.1 that is forwarded to the daemon.
    pub api_port: u16,
    /// Port of 127.0.0.1 that is forwarded to the agent.
    pub agent_port: u16,
    pub image: String,
    pub started_unix_ms: u64,
    /// Milliseconds from the start of QEMU until the agent answered. `None` until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_ms: Option<u64>,
}

impl Record {
    pub const SCHEMA: u32 = SCHEMA;

    /// Reads the record. `None` if the file does not exist.
    pub fn read(path: &Path) -> Result<Option<Self>, MachineError> {
        read_versioned(path, SCHEMA).map_err(|source| MachineError::Record {
            path: path.to_owned(),
            source,
        })
    }

    /// Replaces the record atomically.
    pub fn write(&self, path: &Path) -> Result<(), MachineError> {
        write_json(path, self)
    }
}

/// Reads a JSON file with a `schema` field. `None` if the file does not exist.
pub(crate) fn read_versioned<T: DeserializeOwned>(
    path: &Path,
    known: u32,
) -> Result<Option<T>, RecordProblem> {
    #[derive(Deserialize)]
    struct Version {
        schema: u32,
    }
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(RecordProblem::Read(error)),
    };
    let Version { schema: found } =
        serde_json::from_slice(&bytes).map_err(RecordProblem::Malformed)?;
    if found != known {
        return Err(RecordProblem::Schema { found, known });
    }
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(RecordProblem::Malformed)
}

/// Replaces a JSON file atomically; only the owner can read it.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), MachineError> {
    let bytes = serde_json::to_vec_pretty(value)
        .map_err(|error| file("write", path)(std::io::Error::other(error)))?;
    write_private(path, &bytes)
}

/// Replaces a file atomically; only the owner can read it.
pub(crate) fn write_private(path: &Path, bytes: &[u8]) -> Result<(), MachineError> {
    let staging = path.with_extension(format!("tmp-{}", std::process::id()));
    let written = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&staging)
        .and_then(|mut out| out.write_all(bytes))
        .and_then(|()| fs::rename(&staging, path));
    written.map_err(|source| {
        let _ = fs::remove_file(&staging);
        file("write", path)(source)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn record() -> Record {
        Record {
            schema: SCHEMA,
            instance: "aa".into(),
            qemu: ProcessIdentity {
                pid: 1,
                start_ticks: 2,
            },
            qemu_version: "10.0.2".into(),
            accel: Accel::Tcg,
            accel_reason: "no KVM".into(),
            clock: Clock::Instructions,
            cpus: 2,
            memory: MiB(4096),
            disk: MiB(20480),
            api_port: 8889,
            agent_port: 40000,
            image: "abc".into(),
            started_unix_ms: 5,
            boot_ms: None,
        }
    }

    #[test]
    fn what_is_written_is_read_and_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("machine.json");
        assert_eq!(Record::read(&path).unwrap(), None);
        record().write(&path).unwrap();
        assert_eq!(Record::read(&path).unwrap(), Some(record()));
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn garbage_and_other_versions_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("machine.json");
        for (text, problem) in [
            ("", "malformed"),
            ("{}", "malformed"),
            (r#"{"schema":1}"#, "malformed"),
            (r#"{"schema":7}"#, "format 7"),
        ] {
            fs::write(&path, text).unwrap();
            let MachineError::Record { source, .. } = Record::read(&path).unwrap_err() else {
                panic!("another error");
            };
            assert!(source.to_string().contains(problem), "{text:?}: {source}");
        }
    }
}
