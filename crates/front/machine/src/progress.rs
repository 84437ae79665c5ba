//! Progress reports of a start.
//!
//! A start calls [`Progress::step`] for each [`Step`], in order. The CLI prints the steps; [`Silent`] ignores
//! them.

use std::time::Duration;

/// Steps of a start, in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Another process starts, stops or removes this machine.
    WaitingForOther,
    /// The image is looked up or built.
    Image,
    /// The data disk is created.
    Disk,
    /// QEMU runs and the kernel boots.
    Booting {
        /// A sentence for users about the speed.
        expectation: &'static str,
    },
    /// The boot takes long; `forkd machine logs` shows the console.
    StillBooting {
        /// Time since the wait began.
        after: Duration,
    },
    /// The agent has answered.
    Answered {
        /// Time since the start of QEMU.
        after: Duration,
    },
    /// Programs are copied into the machine.
    Programs { count: usize },
    /// The daemon in the machine is started.
    Daemon,
    /// A paused VM resumes.
    Resumed,
}

/// Receiver of progress reports.
pub trait Progress: Send + Sync {
    fn step(&self, step: &Step);
    /// A line of the image builder's output.
    fn builder(&self, line: &str);
}

/// Ignores all progress.
#[derive(Debug, Clone, Copy)]
pub struct Silent;

impl Progress for Silent {
    fn step(&self, _: &Step) {}
    fn builder(&self, _: &str) {}
}
