//! The measurement and its watchdog.
//!
//! All KVM work happens on a thread of its own that reports step by step. The caller waits with a
//! deadline; past it, the thread is interrupted with a signal and, should even that not help,
//! left behind.

use std::ffi::CString;
use std::os::unix::thread::JoinHandleExt;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::INTERPRETED_FROM_NS;
use crate::guest::{Guest, GuestError, interrupt};

/// Iterations of the short loop, which measures exit and entry.
const SHORT_LOOP: u32 = 1;
/// Iterations of the long loop. Long enough that a stall of a millisecond or two on a loaded host
/// does not look like an interpreter.
const LONG_LOOP: u32 = 20_000;
/// Timeout for creating the VM. An idle host needs milliseconds; a loaded one waits for grace periods of the
/// kernel.
const SETUP_LIMIT: Duration = Duration::from_secs(2);
/// Timeout for one round of guest code: ten times an interpreter of 600 ns per iteration.
const ROUND_LIMIT: Duration = Duration::from_millis(200);
/// A round that looks interpreted is repeated for this time; the fastest round counts.
const ROUNDS_BUDGET: Duration = Duration::from_millis(35);
const MIN_ROUNDS: u32 = 2;
const MAX_ROUNDS: u32 = 8;
/// Time for the thread to end after the signal.
const GRACE: Duration = Duration::from_millis(50);

/// The shortest round trips.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    pub short: Duration,
    pub long: Duration,
    pub nesting: bool,
}

impl Measured {
    fn fastest(best: Option<Self>, short: Duration, long: Duration, nesting: bool) -> Self {
        let (best_short, best_long) = best.map_or((short, long), |best| (best.short, best.long));
        Self {
            short: best_short.min(short),
            long: best_long.min(long),
            nesting,
        }
    }

    /// The difference of the two loops, which cancels the cost of the exit.
    pub fn ns_per_iteration(&self) -> f64 {
        let extra = self.long.saturating_sub(self.short).as_nanos() as f64;
        extra / f64::from(LONG_LOOP - SHORT_LOOP)
    }

    pub fn exit_ns(&self) -> u64 {
        u64::try_from(self.short.as_nanos()).unwrap_or(u64::MAX)
    }
}

/// The result of a run.
#[derive(Debug)]
pub enum Outcome {
    Measured(Measured),
    /// Guest code started and did not return in time.
    TooSlowToMeasure {
        at_least_ns: f64,
    },
    /// KVM itself did not return.
    Stuck,
    Failed(GuestError),
}

enum Step {
    Created { nesting: bool },
    Round { short: Duration, long: Duration },
    Failed(GuestError),
}

/// Measures the KVM device at `device`.
pub fn run(device: CString) -> Outcome {
    let (sender, steps) = mpsc::channel();
    let spawned = thread::Builder::new()
        .name("kvm-probe".to_owned())
        .spawn(move || work(&device, &sender));
    let worker = match spawned {
        Ok(worker) => worker,
        Err(_) => return Outcome::Stuck,
    };
    let outcome = watch(&steps);
    // The receiver is gone: the worker stops at its next step.
    drop(steps);
    end(worker);
    outcome
}

fn watch(steps: &Receiver<Step>) -> Outcome {
    let nesting = match steps.recv_timeout(SETUP_LIMIT) {
        Ok(Step::Created { nesting }) => nesting,
        Ok(Step::Failed(error)) => return Outcome::Failed(error),
        Ok(Step::Round { .. }) | Err(_) => return Outcome::Stuck,
    };
    let started = Instant::now();
    let mut best: Option<Measured> = None;
    for round in 0..MAX_ROUNDS {
        if round >= MIN_ROUNDS && started.elapsed() >= ROUNDS_BUDGET {
            break;
        }
        match steps.recv_timeout(ROUND_LIMIT) {
            Ok(Step::Round { short, long }) => {
                let fastest = Measured::fastest(best, short, long, nesting);
                best = Some(fastest);
                if fastest.ns_per_iteration() < INTERPRETED_FROM_NS {
                    break;
                }
            }
            Ok(Step::Failed(error)) => return Outcome::Failed(error),
            Ok(Step::Created { .. }) => {}
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
        }
    }
    best.map_or_else(
        || Outcome::TooSlowToMeasure {
            at_least_ns: ROUND_LIMIT.as_nanos() as f64 / f64::from(LONG_LOOP),
        },
        Outcome::Measured,
    )
}

/// The worker thread: creates the VM and runs rounds until the receiver is gone.
fn work(device: &CString, steps: &Sender<Step>) {
    let mut guest = match Guest::create(device) {
        Ok(guest) => guest,
        Err(error) => {
            let _ = steps.send(Step::Failed(error));
            return;
        }
    };
    if steps
        .send(Step::Created {
            nesting: guest.nesting(),
        })
        .is_err()
    {
        return;
    }
    // The first entry pays for page faults, which are not measured.
    if let Err(error) = guest.count_down(SHORT_LOOP) {
        let _ = steps.send(Step::Failed(error));
        return;
    }
    for _ in 0..MAX_ROUNDS {
        let step = match round(&mut guest) {
            Ok(step) => step,
            Err(error) => Step::Failed(error),
        };
        let over = matches!(step, Step::Failed(_));
        if steps.send(step).is_err() || over {
            return;
        }
    }
}

fn round(guest: &mut Guest) -> Result<Step, GuestError> {
    let start = Instant::now();
    guest.count_down(SHORT_LOOP)?;
    let middle = Instant::now();
    guest.count_down(LONG_LOOP)?;
    Ok(Step::Round {
        short: middle - start,
        long: middle.elapsed(),
    })
}

/// Ends the worker, which normally ends by itself within a round.
fn end(worker: JoinHandle<()>) {
    let deadline = Instant::now() + GRACE;
    let mut interrupted = false;
    while !worker.is_finished() {
        if Instant::now() >= deadline {
            if interrupted || interrupt(worker.as_pthread_t()).is_err() {
                return;
            }
            interrupted = true;
            thread::park_timeout(GRACE);
            continue;
        }
        thread::park_timeout(Duration::from_millis(1));
    }
    let _ = worker.join();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_of(short: u64, long: u64) -> Step {
        Step::Round {
            short: Duration::from_nanos(short),
            long: Duration::from_nanos(long),
        }
    }

    #[test]
    fn the_fastest_round_counts() {
        let (sender, steps) = mpsc::channel();
        sender.send(Step::Created { nesting: true }).unwrap();
        sender.send(round_of(9_000, 90_000_000)).unwrap();
        sender
            .send(round_of(1_000, 1_000 + u64::from(LONG_LOOP - SHORT_LOOP)))
            .unwrap();
        drop(sender);
        let Outcome::Measured(measured) = watch(&steps) else {
            panic!("nothing measured")
        };
        assert!((measured.ns_per_iteration() - 1.0).abs() < 1e-9);
        assert_eq!(measured.exit_ns(), 1_000);
        assert!(measured.nesting);
    }

    #[test]
    fn a_guest_that_does_not_come_back_is_too_slow() {
        let (sender, steps) = mpsc::channel();
        sender.send(Step::Created { nesting: false }).unwrap();
        let outcome = watch(&steps);
        drop(sender);
        assert!(matches!(outcome, Outcome::TooSlowToMeasure { at_least_ns } if at_least_ns > 1e3));
    }

    #[test]
    fn a_vm_that_never_appears_is_stuck() {
        let (sender, steps) = mpsc::channel::<Step>();
        drop(sender);
        assert!(matches!(watch(&steps), Outcome::Stuck));
    }
}
