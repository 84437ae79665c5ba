//! [`Machine`]: a machine by its name, and the helpers that every operation needs.
//!
//! The record (`machine.json`) describes the running QEMU. A QEMU without a record, or a record without a
//! QEMU, is the remains of a crash; `clear_remains` removes both under the lock.

use std::fs;
use std::io;
use std::path::PathBuf;

use crate::dirs::Dirs;
use crate::error::{MachineError, file};
use crate::layout::Layout;
use crate::lock::MachineLock;
use crate::name::MachineName;
use crate::process::ProcessIdentity;
use crate::progress::{Progress, Step};
use crate::qemu;
use crate::record::Record;

/// A machine by its name. The machine need not exist.
#[derive(Debug, Clone)]
pub struct Machine {
    pub(crate) name: MachineName,
    pub(crate) dirs: Dirs,
    pub(crate) layout: Layout,
}

impl Machine {
    /// The machine of this name of the calling user.
    pub fn named(name: MachineName) -> Result<Self, MachineError> {
        Dirs::of_user()
            .map(|dirs| Self::in_dirs(name, dirs))
            .ok_or(MachineError::NoHome)
    }

    /// The machine of this name below these directories.
    #[must_use]
    pub fn in_dirs(name: MachineName, dirs: Dirs) -> Self {
        let layout = Layout::new(&dirs, &name);
        Self { name, dirs, layout }
    }

    #[must_use]
    pub fn name(&self) -> &MachineName {
        &self.name
    }

    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The machines of the calling user, running or not.
    pub fn list(dirs: &Dirs) -> Result<Vec<Self>, MachineError> {
        let folder = dirs.state.join("machine");
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(file("read", &folder)(source)),
        };
        let mut machines: Vec<Self> = entries
            .filter_map(Result::ok)
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .filter_map(|entry| entry.file_name().into_string().ok()?.parse().ok())
            .map(|name| Self::in_dirs(name, dirs.clone()))
            .collect();
        machines.sort_by(|a, b| a.name.as_str().cmp(b.name.as_str()));
        Ok(machines)
    }

    /// The record of the running machine; an error when it does not run.
    pub(crate) fn running(&self) -> Result<Record, MachineError> {
        self.live_record()?.ok_or_else(|| MachineError::NotRunning {
            name: self.name.to_string(),
        })
    }

    /// The record, if the QEMU it names still runs.
    pub(crate) fn live_record(&self) -> Result<Option<Record>, MachineError> {
        let record = Record::read(&self.layout.record())?;
        Ok(record.filter(|record| record.qemu.is_alive()))
    }

    pub(crate) async fn lock(&self, progress: &dyn Progress) -> Result<MachineLock, MachineError> {
        MachineLock::take(&self.layout.lock(), || {
            progress.step(&Step::WaitingForOther)
        })
        .await
    }

    /// Kills a QEMU that has no record, and removes the files of a machine that no longer runs. The caller
    /// holds the lock.
    pub(crate) fn clear_remains(&self) -> Result<(), MachineError> {
        if let Some(orphan) = qemu::running(&self.layout) {
            kill(&orphan).map_err(file("end the process of", &self.layout.pid_file()))?;
        }
        for path in self.run_files() {
            match fs::remove_file(&path) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(file("remove", &path)(source));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Files that are valid only while the machine runs. The record is removed last: its presence means that
    /// there are files to remove.
    fn run_files(&self) -> [PathBuf; 7] {
        let layout = &self.layout;
        [
            layout.qmp(),
            layout.initrd(),
            layout.token(),
            layout.synced(),
            layout.transfer_disk(),
            layout.pid_file(),
            layout.record(),
        ]
    }
}

/// Kills a process and waits for its end.
pub(crate) fn kill(process: &ProcessIdentity) -> io::Result<()> {
    const LIMIT: std::time::Duration = std::time::Duration::from_secs(20);
    let Some(handle) = process.handle()? else {
        return Ok(());
    };
    handle.kill()?;
    if handle.wait(LIMIT)? {
        Ok(())
    } else {
        Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("process {} does not end", process.pid),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(root: &std::path::Path) -> Machine {
        let dirs = Dirs {
            data: root.join("d"),
            cache: root.join("c"),
            state: root.join("s"),
        };
        Machine::in_dirs(MachineName::default(), dirs)
    }

    #[test]
    fn a_stale_pid_file_harms_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let machine = machine(dir.path());
        machine.layout.create().unwrap();
        // The pid of a process that is alive and not a QEMU of ours: this one.
        fs::write(machine.layout.pid_file(), std::process::id().to_string()).unwrap();
        assert_eq!(qemu::running(&machine.layout), None);
        machine.clear_remains().unwrap();
        assert!(!machine.layout.pid_file().exists());
    }

    #[test]
    fn a_machine_that_never_was_does_not_run() {
        let dir = tempfile::tempdir().unwrap();
        let machine = machine(dir.path());
        let error = machine.running().unwrap_err();
        assert_eq!(error.to_string(), "machine \"default\" is not running");
        assert_eq!(error.hint().unwrap(), "start it with `forkd machine start`");
        assert!(Machine::list(&machine.dirs).unwrap().is_empty());
    }

    #[test]
    fn machines_are_listed_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let machine = machine(dir.path());
        for name in ["b", "a"] {
            let other = Machine::in_dirs(name.parse().unwrap(), machine.dirs.clone());
            other.layout.create().unwrap();
        }
        let names: Vec<String> = Machine::list(&machine.dirs)
            .unwrap()
            .iter()
            .map(|m| m.name.to_string())
            .collect();
        assert_eq!(names, ["a", "b"]);
    }
}
