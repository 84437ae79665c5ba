//! The programs of a daemon: the controller with fake VMMs, or with real ones if the environment names them.
//!
//! Every daemon has its own copies of the programs, so that its processes can be told from those of other daemons.

use std::path::{Path, PathBuf};

/// The directory of `forkd-controller`, and with real VMMs of `forkd-spawn` and `forkd-vmm`.
const PROGRAMS: &str = "FORKD_TEST_PROGRAMS";
/// `real` for VMMs with KVM.
const VMMS: &str = "FORKD_TEST_VMMS";

/// Which VMM is behind the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vmms {
    /// Without KVM; faults can be injected.
    Fake,
    /// The program `forkd-vmm`.
    Real,
}

/// Where the programs lie.
#[derive(Debug, Clone)]
pub struct Programs {
    controller: PathBuf,
    spawn: PathBuf,
    vmm: PathBuf,
    net: PathBuf,
    broker: PathBuf,
    image: PathBuf,
    vmms: Vmms,
}

/// The programs that were built with the calling test. Only an integration test of this package can call this.
#[macro_export]
macro_rules! programs {
    () => {
        $crate::Programs::new(
            env!("CARGO_BIN_EXE_controller-under-test"),
            env!("CARGO_BIN_EXE_fake-spawn"),
            env!("CARGO_BIN_EXE_fake-vmm"),
            env!("CARGO_BIN_EXE_net-under-test"),
            env!("CARGO_BIN_EXE_broker-under-test"),
            env!("CARGO_BIN_EXE_image-under-test"),
        )
    };
}

impl Programs {
    /// The given programs, unless the environment names others.
    ///
    /// # Panics
    ///
    /// Panics when real VMMs are wanted and the environment does not say where the programs are.
    pub fn new(
        controller: &str,
        fake_spawn: &str,
        fake_vmm: &str,
        net: &str,
        broker: &str,
        image: &str,
    ) -> Self {
        let dir = std::env::var_os(PROGRAMS).map(PathBuf::from);
        let built = |name: &str, fake: &str| match &dir {
            Some(dir) => dir.join(name),
            None => PathBuf::from(fake),
        };
        if std::env::var(VMMS).as_deref() != Ok("real") {
            return Self {
                controller: built("forkd-controller", controller),
                spawn: PathBuf::from(fake_spawn),
                vmm: PathBuf::from(fake_vmm),
                net: built("forkd-net", net),
                broker: built("forkd-broker", broker),
                image: built("forkd-image", image),
                vmms: Vmms::Fake,
            };
        }
        assert!(dir.is_some(), "{VMMS}=real needs {PROGRAMS}=DIR");
        Self {
            controller: built("forkd-controller", controller),
            spawn: built("forkd-spawn", fake_spawn),
            vmm: built("forkd-vmm", fake_vmm),
            net: built("forkd-net", net),
            broker: built("forkd-broker", broker),
            image: built("forkd-image", image),
            vmms: Vmms::Real,
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
            (&self.net, "forkd-net"),
            (&self.broker, "forkd-broker"),
            (&self.image, "forkd-image"),
        ] {
            if ["forkd-net", "forkd-broker", "forkd-image"].contains(&name) && !program.exists() {
                // A version from before there was a network engine, or a folder without the program.
                continue;
            }
            let target = dir.path().join(name);
            if std::fs::hard_link(program, &target).is_err() {
                std::fs::copy(program, &target)?;
            }
        }
        Ok(dir)
    }
}
