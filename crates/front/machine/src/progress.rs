//! What a start is doing, told to whoever waits for it.

use std::time::Duration;

/// Steps of a start, in the order they come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Another forkd is starting or stopping this machine.
    WaitingForOther,
    /// The image is looked up or made.
    Image,
    /// The data disk is made.
    Disk,
    /// QEMU runs and the kernel boots.
    Booting {
        /// What to expect.
        expectation: &'static str,
    },
    /// It takes long; `forkd machine logs` shows how far it is.
    StillBooting {
        /// Since the wait began.
        after: Duration,
    },
    /// The agent has answered.
    Answered {
        /// After the start of QEMU.
        after: Duration,
    },
    /// Programs are copied in.
    Programs {
        /// How many.
        count: usize,
    },
    /// The daemon inside is started.
    Daemon,
    /// A stopped VM goes on.
    Resumed,
}

/// Receives the steps.
pub trait Progress: Send + Sync {
    /// A step begins.
    fn step(&self, step: &Step);
    /// A line of the image builder.
    fn builder(&self, line: &str);
}

/// Tells nobody.
#[derive(Debug, Clone, Copy)]
pub struct Silent;

impl Progress for Silent {
    fn step(&self, _: &Step) {}
    fn builder(&self, _: &str) {}
}
