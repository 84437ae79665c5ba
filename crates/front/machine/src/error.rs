//! Errors of operations on a machine.
//!
//! [`MachineError`] is shared by all operations. Each variant has its context in fields and its cause in
//! `source()`. [`MachineError::hint`] tells the user how to fix the problem.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use forkd_types::MiB;

/// Why an operation on a machine failed. [`MachineError::hint`] returns a remedy.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    #[error("no home directory: neither HOME nor the XDG variables are set")]
    NoHome,
    #[error("cannot {action} {}", path.display())]
    File {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the record {} is not readable", path.display())]
    Record {
        path: PathBuf,
        #[source]
        source: RecordProblem,
    },
    #[error("machine {name:?} is not running")]
    NotRunning { name: String },
    /// The operation needs a stopped machine.
    #[error("machine {name:?} is running")]
    Running { name: String },
    #[error("qemu-system-x86_64 was not found")]
    QemuMissing,
    #[error("{} is version {found}; version {minimum} or newer is needed", path.display())]
    QemuTooOld {
        /// The newest QEMU that was found.
        path: PathBuf,
        found: String,
        /// The oldest supported version.
        minimum: u32,
    },
    #[error("qemu could not start the machine: {message}")]
    QemuFailed { message: String },
    #[error("the machine stopped while it was booting")]
    DiedBooting { console: PathBuf },
    #[error("qemu does not answer on {}", path.display())]
    Qmp {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("port {port} of 127.0.0.1 is in use")]
    PortInUse { port: u16 },
    /// KVM was requested and is not usable.
    #[error("KVM was requested and is not usable: {reason}")]
    NoKvm {
        /// The probe's reason.
        reason: String,
    },
    #[error("the instruction clock needs software emulation, and KVM was requested")]
    ClockNeedsEmulation,
    #[error("the instruction clock needs one CPU, and {cpus} were requested")]
    ClockNeedsOneCpu { cpus: u32 },
    #[error("only {free} are free in {}; the machine needs at least {needed}", path.display())]
    DiskFull {
        path: PathBuf,
        free: MiB,
        needed: MiB,
    },
    #[error("the data disk has {current}; it cannot be shrunk to {wanted}")]
    DiskShrink { current: MiB, wanted: MiB },
    #[error("forkd-image was not found beside forkd or in PATH")]
    ImageToolMissing,
    #[error("the machine image could not be built: {message}")]
    ImageFailed {
        /// The last lines of the builder's output.
        message: String,
    },
    /// The builder's result is not an image that this version can start.
    #[error("{} is not a machine image", path.display())]
    ImageInvalid {
        /// The description file of the image.
        path: PathBuf,
        #[source]
        source: RecordProblem,
    },
    #[error("{program} failed: {message}")]
    Tool {
        program: &'static str,
        message: String,
    },
    #[error("the machine did not answer within {} s", waited.as_secs())]
    NoAnswer { waited: Duration, console: PathBuf },
    #[error("cannot {action}")]
    Agent {
        action: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("machine {name:?} is paused: the disk of this host is full")]
    PausedNoSpace { name: String },
    #[error("interrupted; the machine was stopped again")]
    Interrupted,
}

/// Why a file that forkd wrote cannot be read back.
#[derive(Debug, thiserror::Error)]
pub enum RecordProblem {
    #[error("it cannot be read")]
    Read(#[source] io::Error),
    #[error("its content is malformed")]
    Malformed(#[source] serde_json::Error),
    /// Another version of forkd wrote the file.
    #[error("it has format {found}; this version reads format {known}")]
    Schema { found: u32, known: u32 },
    #[error("{0}")]
    Value(&'static str),
}

impl MachineError {
    /// A remedy for the user.
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
                "omit --accel to fall back to software emulation".to_owned()
            }
            Self::ClockNeedsEmulation => "omit --accel, or write --accel tcg".to_owned(),
            Self::ClockNeedsOneCpu { .. } => "omit --cpus, or write --cpus 1".to_owned(),
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

/// Builds the `map_err` closure for a failed file operation.
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
