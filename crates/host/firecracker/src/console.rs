//! The console of the guest: Firecracker prints it to its standard output.
//!
//! A thread reads the pipe at any speed, so the guest never waits for its console. Bytes beyond the rate or the size
//! are dropped.

use std::fs::File;
use std::io::{self, Read, Write};
use std::process::ChildStdout;

use forkd_devices::rate::Budget;

/// Bytes that a guest may print at once, whatever its rate.
const BURST: u64 = 64 * 1024;

/// Where console output goes, and how much of it.
#[derive(Debug)]
pub struct Console {
    pub output: File,
    /// Bytes a second after a burst; 0 is no limit.
    pub bytes_per_second: u64,
    /// Output ends here; 0 is no limit.
    pub max_bytes: u64,
}

impl Console {
    /// Starts the thread. It ends with the pipe.
    pub fn follow(self, pipe: ChildStdout) -> io::Result<()> {
        std::thread::Builder::new()
            .name("console".to_owned())
            .spawn(move || self.copy(pipe))?;
        Ok(())
    }

    fn copy(mut self, mut pipe: impl Read) {
        let mut budget = Budget::new(self.bytes_per_second, BURST);
        let mut left = match self.max_bytes {
            0 => u64::MAX,
            most => most,
        };
        let mut buffer = [0; 4096];
        loop {
            let count = match pipe.read(&mut buffer) {
                Ok(0) => return,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return,
            };
            let allowed = budget
                .as_mut()
                .is_none_or(|budget| budget.take(count as u64));
            // `count` is at most the length of the buffer.
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(count);
            let piece = buffer.get(..most).unwrap_or_default();
            if allowed && self.output.write_all(piece).is_ok() {
                left -= piece.len() as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Seek;

    use super::*;

    #[test]
    fn output_stops_at_the_largest_size_and_reading_goes_on() {
        let mut output = tempfile::tempfile().unwrap();
        let console = Console {
            output: output.try_clone().unwrap(),
            bytes_per_second: 0,
            max_bytes: 5000,
        };
        let printed = vec![b'x'; 20_000];
        let mut pipe = printed.as_slice();
        console.copy(&mut pipe);
        assert!(pipe.is_empty());
        output.rewind().unwrap();
        let mut text = Vec::new();
        output.read_to_end(&mut text).unwrap();
        assert_eq!(text.len(), 5000);
    }
}
