//! Why something about a machine did not work, and what can be done about it.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use forkd_types::MiB;

/// Why an operation on a machine failed. The chain of causes is in `source()`; what the user can do
/// is in [`MachineError::hint`].
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// Neither `HOME` nor the XDG variables say where files go.
    #[error("no home directory: neither HOME nor the XDG variables are set")]
    NoHome,
    /// A file operation failed.
    #[error("cannot {action} {}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The record of the machine cannot be read by this version.
    #[error("the record {} is not readable", path.display())]
    Record {
        /// The record.
        path: PathBuf,
        #[source]
        source: RecordProblem,
    },
    /// The machine does not run.
    #[error("machine {name:?} is not running")]
    NotRunning {
        /// Which machine.
        name: String,
    },
    /// The machine runs, and what was asked for needs it stopped.
    #[error("machine {name:?} is running")]
    Running {
        /// Which machine.
        name: String,
    },
    /// No QEMU was found.
    #[error("qemu-system-x86_64 was not found")]
    QemuMissing,
    /// Only unsuitable QEMUs were found.
    #[error("{} is version {found}; version {minimum} or newer is needed", path.display())]
    QemuTooOld {
        /// The newest that was found.
        path: PathBuf,
        /// Its version.
        found: String,
        /// The oldest that works.
        minimum: u32,
    },
    /// QEMU ended instead of starting the machine.
    #[error("qemu could not start the machine: {message}")]
    QemuFailed {
        /// What it printed.
        message: String,
    },
    /// QEMU ended while the machine was booting.
    #[error("the machine stopped while it was booting")]
    DiedBooting {
        /// Where its console output is.
        console: PathBuf,
    },
    /// The machine's QEMU does not answer on its control socket.
    #[error("qemu does not answer on {}", path.display())]
    Qmp {
        /// The socket.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A port of the host is taken.
    #[error("port {port} of 127.0.0.1 is in use")]
    PortInUse {
        /// Which port.
        port: u16,
    },
    /// Hardware acceleration was asked for and is not to be had.
    #[error("hardware acceleration was asked for, and this host has none: {reason}")]
    NoKvm {
        /// What the probe found.
        reason: String,
    },
    /// There is too little room on the host's disk.
    #[error("only {free} are free in {}; the machine needs at least {needed}", path.display())]
    DiskFull {
        /// Where.
        path: PathBuf,
        /// What is free.
        free: MiB,
        /// What is needed.
        needed: MiB,
    },
    /// A disk cannot be made smaller.
    #[error("the data disk has {current}; it cannot be shrunk to {wanted}")]
    DiskShrink {
        /// Its size.
        current: MiB,
        /// The size asked for.
        wanted: MiB,
    },
    /// The program that makes images is not there.
    #[error("forkd-image was not found beside forkd or in PATH")]
    ImageToolMissing,
    /// The image could not be made.
    #[error("the machine image could not be built: {message}")]
    ImageFailed {
        /// The last lines of the builder.
        message: String,
    },
    /// What the builder left is not an image this version can start.
    #[error("{} is not a machine image", path.display())]
    ImageInvalid {
        /// The image's description.
        path: PathBuf,
        #[source]
        source: RecordProblem,
    },
    /// A helper program of the host failed.
    #[error("{program} failed: {message}")]
    Tool {
        /// Which program.
        program: &'static str,
        /// What it printed.
        message: String,
    },
    /// The agent in the machine did not answer.
    #[error("the machine did not answer within {} s", waited.as_secs())]
    NoAnswer {
        /// How long it was waited.
        waited: Duration,
        /// Where the console output is.
        console: PathBuf,
    },
    /// The conversation with the agent broke.
    #[error("cannot {action}")]
    Agent {
        /// What was tried.
        action: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The machine stands still because the host's disk is full.
    #[error("machine {name:?} is paused: the disk of this host is full")]
    PausedNoSpace {
        /// Which machine.
        name: String,
    },
    /// The start was interrupted by the user.
    #[error("interrupted; the machine was stopped again")]
    Interrupted,
}

/// Why a file of ours cannot be read back.
#[derive(Debug, thiserror::Error)]
pub enum RecordProblem {
    /// It cannot be read.
    #[error("it cannot be read")]
    Read(#[source] io::Error),
    /// It is not the JSON we write.
    #[error("its content is malformed")]
    Malformed(#[source] serde_json::Error),
    /// Another version of forkd wrote it.
    #[error("it has format {found}; this version reads format {known}")]
    Schema {
        /// The format in the file.
        found: u32,
        /// The format we know.
        known: u32,
    },
    /// A value in it is out of range.
    #[error("{0}")]
    Value(&'static str),
}

impl MachineError {
    /// What the user can do about it.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::NoHome => "set HOME".to_owned(),
            Self::NotRunning { name } => format!("start it with `{}`", command("start", name)),
            Self::Running { name } => {
                format!("stop it with `{}`, or add --force", command("stop", name))
            }
            Self::QemuMissing => {
                "run `make setup`, or install qemu-system-x86 (version 10 or newer); FORKD_QEMU names one elsewhere"
                    .to_owned()
            }
            Self::QemuTooOld { .. } => {
                "run `make setup`: on Debian 12 a new QEMU comes from the backports suite; FORKD_QEMU names one elsewhere"
                    .to_owned()
            }
            Self::PortInUse { .. } => {
                "choose another with --port, or let one be chosen with --port 0".to_owned()
            }
            Self::NoKvm { .. } => {
                "leave --accel out to use software emulation where it must be".to_owned()
            }
            Self::DiskFull { .. } => "free some space, or point XDG_STATE_HOME elsewhere".to_owned(),
            Self::DiskShrink { .. } => {
                "leave --disk out, or remove the machine and its data with `forkd machine rm`"
                    .to_owned()
            }
            Self::ImageToolMissing => "run `make build`, which leaves it beside forkd".to_owned(),
            Self::DiedBooting { console } | Self::NoAnswer { console, .. } => {
                format!("its console output is in {}", console.display())
            }
            Self::PausedNoSpace { name } => {
                format!("free some space, then `{}` lets it go on", command("start", name))
            }
            Self::Record { .. } => "remove the machine with `forkd machine rm --force`".to_owned(),
            Self::File { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                "the disk is full: free some space and try again".to_owned()
            }
            _ => return None,
        };
        Some(hint)
    }
}

fn command(verb: &str, name: &str) -> String {
    if name == "default" {
        format!("forkd machine {verb}")
    } else {
        format!("forkd machine {verb} --name {name}")
    }
}

/// For `map_err`: a failed file operation.
pub(crate) fn file<'a>(
    action: &'static str,
    path: &'a std::path::Path,
) -> impl FnOnce(io::Error) -> MachineError + 'a {
    move |source| MachineError::File {
        action,
        path: path.to_owned(),
        source,
    }
}
