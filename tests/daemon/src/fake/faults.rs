//! Faults that a scenario injects into fake VMMs.
//!
//! A fault is a file in `waiting/`, named by its step and a number. The first VMM that arrives at the step claims the
//! fault with lowest number by renaming the file into `reached/`: each fault strikes exactly once. A VMM that is held waits
//! until the same name appears in `released/`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A point in the life of a VM at which a fault can strike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// The first message of a new VMM process.
    Hello,
    /// The shell is about to be built.
    Prepare,
    /// A kernel is about to be booted.
    Boot,
    /// The shell is about to be filled from a snapshot.
    Restore,
    /// The daemon connects to the agent.
    Connect,
    /// The agent is asked to take its identity.
    Identity,
    /// The agent is about to renew its random numbers. `Fail` leaves the old ones, and the agent reports it.
    Reseed,
    /// The agent is asked to freeze user processes.
    Freeze,
    /// The agent is asked to run a program.
    Exec,
    /// The VM is about to be paused.
    Pause,
    /// The VM is about to be resumed.
    Resume,
    /// A cut was requested; the VM still runs.
    Cut,
    /// The instant of a cut is captured and announced; nothing is written.
    CutTaken,
    /// Everything of a cut is written; the reply is not sent.
    CutWritten,
    /// A checkpoint was requested.
    Checkpoint,
    /// The instant of a checkpoint is captured and announced.
    CheckpointTaken,
    /// A roll-back was requested.
    Rollback,
    /// The guest is rolled back; the reply is not sent.
    RolledBack,
    /// Merged disk layers are handed over.
    MergedLayer,
    /// A volume is about to be attached.
    AttachDisk,
    /// The agent is asked to mount a volume.
    Mount,
    /// The agent is asked to hold the writes to a volume, or to let them go on.
    HoldWrites,
    /// The VM is asked to end.
    Stop,
}

impl Step {
    /// Every step of a cut, in order.
    pub const OF_A_CUT: [Self; 3] = [Self::Cut, Self::CutTaken, Self::CutWritten];

    fn name(self) -> &'static str {
        match self {
            Self::Hello => "hello",
            Self::Prepare => "prepare",
            Self::Boot => "boot",
            Self::Restore => "restore",
            Self::Connect => "connect",
            Self::Identity => "identity",
            Self::Reseed => "reseed",
            Self::Freeze => "freeze",
            Self::Exec => "exec",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Cut => "cut",
            Self::CutTaken => "cut-taken",
            Self::CutWritten => "cut-written",
            Self::Checkpoint => "checkpoint",
            Self::CheckpointTaken => "checkpoint-taken",
            Self::Rollback => "rollback",
            Self::RolledBack => "rolled-back",
            Self::MergedLayer => "merged-layer",
            Self::AttachDisk => "attach-disk",
            Self::Mount => "mount",
            Self::HoldWrites => "hold-writes",
            Self::Stop => "stop",
        }
    }
}

/// The way in which a step fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fault {
    /// None: the VMM that claims this one is spared.
    Pass,
    /// The step is refused with an I/O error.
    Fail,
    /// The VMM process ends by `SIGKILL`.
    Die,
    /// Bytes that are no message are sent.
    Garbage,
    /// The step waits until the scenario releases it.
    Hold,
}

/// A fault that was injected.
#[derive(Debug, Clone)]
pub struct Injected {
    name: String,
}

/// The directory of faults.
#[derive(Debug)]
pub struct Faults {
    dir: PathBuf,
    next: AtomicU32,
}

impl Faults {
    /// The directory of the programs in `path`'s directory.
    pub fn beside(path: &Path) -> Self {
        Self {
            dir: path.with_file_name("faults"),
            next: AtomicU32::new(0),
        }
    }

    /// Makes the directories.
    pub fn create(&self) -> io::Result<()> {
        ["waiting", "reached", "released"]
            .iter()
            .try_for_each(|name| fs::create_dir_all(self.dir.join(name)))
    }

    /// Lets a fault strike the next VMM that arrives at `step`.
    ///
    /// # Panics
    ///
    /// Panics when the fault cannot be written.
    pub fn inject(&self, step: Step, fault: Fault) -> Injected {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}.{number:06}", step.name());
        let text = serde_json::to_vec(&fault).expect("a fault encodes");
        // Written under another name first: a VMM must not claim half a fault.
        let new = self.dir.join(&name);
        fs::write(&new, text).expect("a fault is written");
        fs::rename(new, self.dir.join("waiting").join(&name)).expect("a fault is put in place");
        Injected { name }
    }

    /// Lets a fault strike the VMM that arrives at `step` after `spared` others.
    pub fn inject_after(&self, spared: usize, step: Step, fault: Fault) -> Injected {
        for _ in 0..spared {
            self.inject(step, Fault::Pass);
        }
        self.inject(step, fault)
    }

    /// How many of the faults a VMM has arrived at.
    pub fn count_reached(&self, faults: &[Injected]) -> usize {
        let reached = self.dir.join("reached");
        faults
            .iter()
            .filter(|fault| reached.join(&fault.name).exists())
            .count()
    }

    /// Waits until a VMM has arrived at the fault.
    pub async fn reached(&self, fault: &Injected) {
        let path = self.dir.join("reached").join(&fault.name);
        crate::until(&format!("a VMM arrives at {}", fault.name), async || {
            path.exists().then_some(())
        })
        .await;
    }

    /// Lets a held VMM go on.
    ///
    /// # Panics
    ///
    /// Panics when the release cannot be written.
    pub fn release(&self, fault: &Injected) {
        fs::write(self.dir.join("released").join(&fault.name), b"").expect("a release is written");
    }

    /// Forgets all faults that no VMM has claimed.
    ///
    /// # Panics
    ///
    /// Panics when the directory cannot be emptied.
    pub fn clear(&self) {
        for entry in fs::read_dir(self.dir.join("waiting")).expect("faults are listed") {
            // A VMM may claim it this moment.
            let _ = fs::remove_file(entry.expect("a fault is listed").path());
        }
    }

    /// Claims the fault for a VMM that arrives at `step`, and sits out a hold.
    pub(super) fn arrive(&self, step: Step) -> Fault {
        loop {
            let Some(name) = self.first(step) else {
                return Fault::Pass;
            };
            let reached = self.dir.join("reached").join(&name);
            if fs::rename(self.dir.join("waiting").join(&name), &reached).is_err() {
                // Another VMM was faster.
                continue;
            }
            let fault = fs::read(&reached)
                .ok()
                .and_then(|text| serde_json::from_slice(&text).ok())
                .unwrap_or(Fault::Pass);
            return match fault {
                Fault::Hold => {
                    self.sit_out(&name);
                    Fault::Pass
                }
                other => other,
            };
        }
    }

    fn first(&self, step: Step) -> Option<String> {
        let prefix = format!("{}.", step.name());
        fs::read_dir(self.dir.join("waiting"))
            .ok()?
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| name.starts_with(&prefix))
            .min()
    }

    fn sit_out(&self, name: &str) {
        let released = self.dir.join("released").join(name);
        // A scenario that is over has removed the directory.
        while !released.exists() && self.dir.exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_strikes_once_and_after_those_that_are_spared() {
        let dir = tempfile::tempdir().unwrap();
        let faults = Faults::beside(&dir.path().join("forkd-vmm"));
        faults.create().unwrap();
        faults.inject_after(1, Step::Restore, Fault::Die);
        assert_eq!(faults.arrive(Step::Boot), Fault::Pass);
        assert_eq!(faults.arrive(Step::Restore), Fault::Pass);
        assert_eq!(faults.arrive(Step::Restore), Fault::Die);
        assert_eq!(faults.arrive(Step::Restore), Fault::Pass);
    }

    #[test]
    fn a_step_is_not_taken_for_one_whose_name_begins_alike() {
        let dir = tempfile::tempdir().unwrap();
        let faults = Faults::beside(&dir.path().join("forkd-vmm"));
        faults.create().unwrap();
        faults.inject(Step::CutTaken, Fault::Die);
        assert_eq!(faults.arrive(Step::Cut), Fault::Pass);
        assert_eq!(faults.arrive(Step::CutTaken), Fault::Die);
    }
}
