//! Being asked to stop.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::error::Exit;

/// Ctrl-C and SIGTERM, from when it is made: what comes before it is asked for is kept.
pub struct Stop {
    interrupt: Signal,
    terminate: Signal,
}

impl Stop {
    /// From now on these signals do not end the program.
    pub fn listen() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    /// Waits for one; gives what a shell says of a program that it ended.
    pub async fn asked(&mut self) -> Exit {
        tokio::select! {
            _ = self.interrupt.recv() => Exit::INTERRUPTED,
            _ = self.terminate.recv() => Exit::TERMINATED,
        }
    }
}
