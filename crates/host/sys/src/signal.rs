//! The signal that takes a vCPU thread out of the guest.
#![allow(unsafe_code)]

use std::io;

/// Which thread to wake.
///
/// The thread id stays valid as long as the thread runs; a vCPU thread ends only with its process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KickTarget {
    tid: libc::pid_t,
}

extern "C" fn on_kick(_: libc::c_int) {}

fn kick_signal() -> libc::c_int {
    libc::SIGRTMIN()
}

/// Installs an empty handler for the kick signal, so that it interrupts `KVM_RUN` and nothing else.
pub fn install_kick_handler() -> io::Result<()> {
    // SAFETY: the structure is plain data, zero is a valid value of every field, and the handler is a
    // function that does nothing and so is async-signal-safe.
    let rc = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_kick as *const () as usize;
        libc::sigaction(kick_signal(), &action, std::ptr::null_mut())
    };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Lets a write to a closed pipe fail with an error instead of ending the process.
pub fn ignore_sigpipe() {
    // SAFETY: SIG_IGN is a valid disposition for SIGPIPE.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
    }
}

impl KickTarget {
    /// The calling thread.
    pub fn current() -> Self {
        // SAFETY: gettid takes no arguments and cannot fail.
        let tid = unsafe { libc::syscall(libc::SYS_gettid) };
        Self {
            tid: tid as libc::pid_t,
        }
    }

    /// Sends the kick signal to the thread.
    pub fn kick(self) -> io::Result<()> {
        // SAFETY: tgkill touches no memory; the signal has a handler that does nothing.
        let rc =
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), self.tid, kick_signal()) };
        if rc == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kick_interrupts_a_blocking_call() {
        install_kick_handler().unwrap();
        let (reader, _writer) = std::io::pipe().unwrap();
        let (send, receive) = std::sync::mpsc::channel();
        let blocked = std::thread::spawn(move || {
            send.send(KickTarget::current()).unwrap();
            let mut byte = [0];
            rustix::io::read(&reader, &mut byte)
        });
        let target = receive.recv().unwrap();
        while !blocked.is_finished() {
            target.kick().ok();
            std::thread::yield_now();
        }
        assert_eq!(blocked.join().unwrap(), Err(rustix::io::Errno::INTR));
    }
}
