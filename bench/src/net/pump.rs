//! Moves frames between two descriptors, in the place of a VMM.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

/// A virtio header and the largest frame.
const MAX_FRAME: usize = 12 + 65535 + 18;

/// Two threads, one for each direction. They end when one of the descriptors does.
pub struct Pump {
    cpu_us: [Arc<AtomicU64>; 2],
}

impl Pump {
    pub fn start(one: OwnedFd, other: OwnedFd) -> anyhow::Result<Self> {
        let (one, other) = (Arc::new(one), Arc::new(other));
        let pump = Self {
            cpu_us: Default::default(),
        };
        let ways = [(Arc::clone(&one), Arc::clone(&other)), (other, one)];
        for ((from, to), cpu) in ways.into_iter().zip(&pump.cpu_us) {
            let cpu = Arc::clone(cpu);
            std::thread::Builder::new()
                .name("pump".to_owned())
                .spawn(move || carry(&from, &to, &cpu))?;
        }
        Ok(pump)
    }

    /// The CPU time of both threads so far.
    pub fn cpu(&self) -> Duration {
        let all = self.cpu_us.iter().map(|cpu| cpu.load(Ordering::Relaxed));
        Duration::from_micros(all.sum())
    }
}

fn carry(from: &OwnedFd, to: &OwnedFd, cpu: &AtomicU64) {
    let mut frame = vec![0; MAX_FRAME];
    loop {
        match rustix::io::read(from, &mut frame) {
            Ok(0) => return,
            Ok(len) => {
                while let Err(Errno::AGAIN | Errno::NOBUFS) = rustix::io::write(to, &frame[..len]) {
                    wait(to, PollFlags::OUT);
                }
            }
            Err(Errno::AGAIN) => {
                let time = clock_gettime(ClockId::ThreadCPUTime);
                let micros = time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1000;
                cpu.store(micros, Ordering::Relaxed);
                wait(from, PollFlags::IN);
            }
            // A tap device that is down gives an error until it is up.
            Err(Errno::IO | Errno::BADFD | Errno::INTR) => wait(from, PollFlags::IN),
            Err(_) => return,
        }
    }
}

fn wait(descriptor: &OwnedFd, events: PollFlags) {
    let _ = poll(
        &mut [PollFd::from_borrowed_fd(descriptor.as_fd(), events)],
        None,
    );
}
