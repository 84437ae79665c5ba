//! The running half of a fake VM, shared by the session and the agent's connections.
//!
//! Lock order: `state` before `connections`; neither is held while a message is sent.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use forkd_sys::Channel;
use forkd_vmm_proto::{Event, ExitCode, FromVmm, StopCause, encode};

use super::faults::{Fault, Faults, Step};
use super::guest::Guest;
use super::net::Device;
use super::volumes::Volumes;

/// Bytes that decode as no message of any protocol in use.
pub(super) const GARBAGE: [u8; 16] = [0xff; 16];

/// A VM and the socket its owner listens on.
#[derive(Debug)]
pub(super) struct Vm {
    control: Channel,
    faults: Faults,
    state: Mutex<State>,
    resumed: Condvar,
    connections: Mutex<Vec<UnixStream>>,
    pub net: Device,
    pub volumes: Volumes,
}

#[derive(Debug, Default)]
struct State {
    guest: Guest,
    running: bool,
}

impl Vm {
    pub fn new(control: Channel, faults: Faults) -> Self {
        Self {
            control,
            faults,
            state: Mutex::default(),
            resumed: Condvar::new(),
            connections: Mutex::default(),
            net: Device::default(),
            volumes: Volumes::default(),
        }
    }

    pub fn control(&self) -> &Channel {
        &self.control
    }

    /// Runs `work` on the guest as its vCPUs would: not while the VM is paused.
    pub fn with_guest<T>(&self, work: impl FnOnce(&mut Guest) -> T) -> T {
        let mut state = lock(&self.state);
        while !state.running {
            state = self
                .resumed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        let done = work(&mut state.guest);
        // A fake disk that is full is not part of any test.
        self.volumes
            .store(&state.guest)
            .expect("a volume is written");
        done
    }

    /// The guest as it is; the caller has paused the VM.
    pub fn capture(&self) -> Guest {
        lock(&self.state).guest.clone()
    }

    pub fn replace(&self, guest: Guest) {
        lock(&self.state).guest = guest;
    }

    pub fn is_running(&self) -> bool {
        lock(&self.state).running
    }

    pub fn pause(&self) {
        lock(&self.state).running = false;
    }

    pub fn resume(&self) {
        lock(&self.state).running = true;
        self.resumed.notify_all();
    }

    pub fn keep_connection(&self, stream: &UnixStream) {
        lock(&self.connections).extend(stream.try_clone());
    }

    /// Closes every connection to the agent, as a roll-back does.
    pub fn reset_connections(&self) {
        for stream in lock(&self.connections).drain(..) {
            // The daemon may have closed its end already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Arrives at a step. `Die` does not return; the caller carries out `Fail` and `Garbage`.
    pub fn arrive(&self, step: Step) -> Fault {
        let fault = self.faults.arrive(step);
        if fault == Fault::Die {
            die();
        }
        fault
    }

    /// Sends a message; a daemon that is gone is no reason to stop, its successor adopts the VM.
    pub fn send(&self, message: &FromVmm) {
        if let Ok(bytes) = encode(message) {
            let _ = self.control.send(&bytes, &[]);
        }
    }

    /// Ends the process because the guest ended.
    pub fn end(&self, cause: StopCause) -> ! {
        self.send(&FromVmm::Event(Event::Stopped { cause }));
        std::process::exit(ExitCode::from(cause) as i32)
    }
}

fn die() -> ! {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    unreachable!("a process does not survive SIGKILL")
}

/// The state is whole after every statement, so a panic elsewhere does not spoil it.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
