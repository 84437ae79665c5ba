//! The programs a daemon is made of.

use std::path::{Path, PathBuf};

/// Overrides the directory of `forkd-controller`, `forkd-spawn` and `forkd-vmm`.
const PROGRAMS: &str = "FORKD_TEST_PROGRAMS";
/// `real` for VMMs with KVM.
const VMMS: &str = "FORKD_TEST_VMMS";

/// Which VMM is behind the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vmms {
    /// Without KVM; faults can be injected.
    Fake,
    /// `forkd-vmm`.
    Real,
}

/// Where the programs lie.
#[derive(Debug, Clone)]
pub struct Programs {
    controller: PathBuf,
    spawn: PathBuf,
    vmm: PathBuf,
    vmms: Vmms,
}

/// The programs that were built with the calling test. Only an integration test of this package can call this.
#[macro_export]
macro_rules! programs {
    () => {
        $crate::Programs::new(
            env!("CARGO_BIN_EXE_controller-under-test"),
            env!("CARGO_BIN_EXE_spawn-under-test"),
            env!("CARGO_BIN_EXE_fake-vmm"),
        )
    };
}

impl Programs {
    /// The given programs, unless the environment names others.
    ///
    /// # Panics
    ///
    /// Panics when real VMMs are wanted and the environment does not say where the programs are.
    pub fn new(controller: &str, spawn: &str, fake_vmm: &str) -> Self {
        let dir = std::env::var_os(PROGRAMS).map(PathBuf::from);
        let program = |name: &str, built: &str| match &dir {
            Some(dir) => dir.join(name),
            None => PathBuf::from(built),
        };
        let vmms = match std::env::var(VMMS).as_deref() {
            Ok("real") => Vmms::Real,
            _ => Vmms::Fake,
        };
        let vmm = match vmms {
            Vmms::Fake => PathBuf::from(fake_vmm),
            Vmms::Real => dir
                .as_ref()
                .unwrap_or_else(|| panic!("{VMMS}=real needs {PROGRAMS}=DIR"))
                .join("forkd-vmm"),
        };
        Self {
            controller: program("forkd-controller", controller),
            spawn: program("forkd-spawn", spawn),
            vmm,
            vmms,
        }
    }

    /// Which VMM is behind the daemon.
    pub fn vmms(&self) -> Vmms {
        self.vmms
    }

    /// Gives the programs the names they know each other by, in a new directory. Every daemon has its own copies, so its
    /// processes are told from those of others by the path of their program.
    pub(crate) fn install(&self) -> std::io::Result<tempfile::TempDir> {
        // Beside the programs: a hard link does not leave its file system.
        let beside = self.vmm.parent().unwrap_or(Path::new("."));
        let dir = tempfile::Builder::new()
            .prefix("daemon-")
            .tempdir_in(beside)?;
        for (program, name) in [
            (&self.controller, "forkd-controller"),
            (&self.spawn, "forkd-spawn"),
            (&self.vmm, "forkd-vmm"),
        ] {
            let target = dir.path().join(name);
            if std::fs::hard_link(program, &target).is_err() {
                std::fs::copy(program, &target)?;
            }
        }
        Ok(dir)
    }
}
