//! Finds a QEMU that is new enough.
//!
//! Order: `FORKD_QEMU`, the programs in `PATH`, then the QEMU that `make setup` unpacked into the cache.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::dirs::{Dirs, named};
use crate::error::MachineError;

const PROGRAM: &str = "qemu-system-x86_64";
/// Older versions corrupt SMP guests that use nested virtualisation.
const MINIMUM_MAJOR: u32 = 10;

/// A QEMU that is new enough.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qemu {
    pub program: PathBuf,
    /// The version as QEMU prints it.
    pub version: String,
}

impl Qemu {
    /// Returns `FORKD_QEMU`, or the first QEMU in `PATH` and in the cache that is new enough.
    pub fn find(dirs: &Dirs) -> Result<Self, MachineError> {
        if let Some(named) = named("FORKD_QEMU") {
            return Self::first_of([named]);
        }
        let path = env::var_os("PATH").unwrap_or_default();
        let in_path = env::split_paths(&path).map(|dir| dir.join(PROGRAM));
        let unpacked = dirs.cache.join("qemu/bin").join(PROGRAM);
        Self::first_of(in_path.chain([unpacked]))
    }

    fn first_of(candidates: impl IntoIterator<Item = PathBuf>) -> Result<Self, MachineError> {
        let mut too_old = None;
        for program in candidates {
            let Some(version) = version_of(&program) else {
                continue;
            };
            if major(&version) >= Some(MINIMUM_MAJOR) {
                return Ok(Self { program, version });
            }
            too_old.get_or_insert((program, version));
        }
        Err(match too_old {
            Some((path, found)) => MachineError::QemuTooOld {
                path,
                found,
                minimum: MINIMUM_MAJOR,
            },
            None => MachineError::QemuMissing,
        })
    }
}

fn version_of(program: &Path) -> Option<String> {
    if !program.is_file() {
        return None;
    }
    let output = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .ok()?;
    parse_version(&String::from_utf8_lossy(&output.stdout))
}

/// The first line reads `QEMU emulator version 10.0.2 (Debian …)`.
fn parse_version(text: &str) -> Option<String> {
    let (_, rest) = text.lines().next()?.split_once(" version ")?;
    rest.split_ascii_whitespace().next().map(str::to_owned)
}

fn major(version: &str) -> Option<u32> {
    version.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn fake(dir: &Path, name: &str, version: &str) -> PathBuf {
        let path = dir.join(name);
        std::fs::write(
            &path,
            format!("#!/bin/sh\necho 'QEMU emulator version {version} (x)'\n"),
        )
        .unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn an_old_one_is_passed_over_for_a_newer_one() {
        let dir = tempfile::tempdir().unwrap();
        let old = fake(dir.path(), "old", "7.2.19");
        let new = fake(dir.path(), "new", "10.0.2");
        let found = Qemu::first_of([dir.path().join("none"), old, new.clone()]).unwrap();
        assert_eq!(
            found,
            Qemu {
                program: new,
                version: "10.0.2".to_owned()
            }
        );
    }

    #[test]
    fn too_old_and_missing_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let old = fake(dir.path(), "old", "7.2.19");
        let error = Qemu::first_of([old]).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("is version 7.2.19; version 10 or newer"),
            "{error}"
        );
        assert!(matches!(Qemu::first_of([]), Err(MachineError::QemuMissing)));
    }
}
