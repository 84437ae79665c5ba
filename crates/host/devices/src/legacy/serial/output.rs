//! Console output: a bounded buffer between the serial port and the console descriptor.
//!
//! Output beyond the rate, the size of the console or the buffer is dropped and counted.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::SerialMetrics;
use crate::EventFd;
use crate::rate::Budget;

/// Bytes kept while the console does not take them.
const BUFFER: usize = 64 * 1024;
/// Bytes that a guest may print at once, whatever its rate.
const BURST: u64 = 64 * 1024;

/// Where the serial port's output goes.
#[derive(Debug)]
pub struct Console {
    /// A file, a pipe or a terminal; it is made non-blocking.
    pub output: OwnedFd,
    /// Bytes a second after a burst of 64 KiB; 0 is no limit.
    pub bytes_per_second: u64,
    /// Output ends here; 0 is no limit.
    pub max_bytes: u64,
}

struct Sink {
    fd: OwnedFd,
    budget: Option<Budget>,
    left: u64,
}

/// The port's side of the console: takes bytes at any speed and never blocks.
pub(super) struct Output {
    buffer: VecDeque<u8>,
    sink: Option<Sink>,
    wake: Arc<EventFd>,
    metrics: Arc<SerialMetrics>,
}

/// How far a drain came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Drained {
    /// Nothing is left.
    All,
    /// The console takes no more for now.
    Blocked,
}

impl Output {
    pub(super) fn new(wake: Arc<EventFd>, metrics: Arc<SerialMetrics>) -> Self {
        Self {
            buffer: VecDeque::new(),
            sink: None,
            wake,
            metrics,
        }
    }

    pub(super) fn attach(&mut self, console: Console) -> io::Result<()> {
        let flags = rustix::fs::fcntl_getfl(&console.output)?;
        rustix::fs::fcntl_setfl(&console.output, flags | rustix::fs::OFlags::NONBLOCK)?;
        self.sink = Some(Sink {
            fd: console.output,
            budget: Budget::new(console.bytes_per_second, BURST),
            left: match console.max_bytes {
                0 => u64::MAX,
                max => max,
            },
        });
        Ok(())
    }

    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.sink.as_ref().map(|sink| sink.fd.as_fd())
    }

    fn push(&mut self, byte: u8) {
        self.metrics.printed.inc();
        let room = self.buffer.len() < BUFFER;
        let Some(sink) = self.sink.as_mut().filter(|sink| room && sink.left > 0) else {
            self.metrics.dropped.inc();
            return;
        };
        if !sink.budget.as_mut().is_none_or(|budget| budget.take(1)) {
            self.metrics.dropped.inc();
            return;
        }
        sink.left -= 1;
        self.buffer.push_back(byte);
        if self.buffer.len() == 1 {
            // An eventfd that is open can always be raised.
            let _ = self.wake.signal();
        }
    }

    /// Writes what the console takes.
    pub(super) fn drain(&mut self) -> Drained {
        while !self.buffer.is_empty() {
            let Some(sink) = &self.sink else {
                self.buffer.clear();
                break;
            };
            let (chunk, _) = self.buffer.as_slices();
            match rustix::io::write(&sink.fd, chunk) {
                Ok(0) | Err(rustix::io::Errno::AGAIN) => return Drained::Blocked,
                Ok(count) => {
                    self.metrics.written.add(count as u64);
                    self.buffer.drain(..count);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => {
                    self.metrics.write_errors.inc();
                    self.metrics.dropped.add(self.buffer.len() as u64);
                    self.buffer.clear();
                }
            }
        }
        self.buffer.shrink_to(4096);
        Drained::All
    }
}

impl io::Write for Output {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        for &byte in data {
            self.push(byte);
        }
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
