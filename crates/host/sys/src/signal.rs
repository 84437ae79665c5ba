//! Signals: the kick that takes a vCPU thread out of the guest, and the trap of forbidden system calls.
//!
//! The kick is the first real-time signal with an empty handler, so it interrupts `KVM_RUN` and does nothing
//! else. The system call filter allows this signal and `SIGABRT`, to the own process only.
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

extern "C" fn on_forbidden_call(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // The kernel puts the number of the system call here; libc has no name for the field.
    const SYSCALL: usize = 24;
    // SAFETY: for this signal the kernel fills in the structure up to and beyond the field.
    let mut number = unsafe {
        info.cast::<u8>()
            .add(SYSCALL)
            .cast::<libc::c_int>()
            .read_unaligned()
    };
    let mut text = *b"forkd-vmm: forbidden system call 0000\n";
    let mut at = text.len() - 2;
    while number > 0 && at > 32 {
        text[at] = b'0' + (number % 10) as u8;
        number /= 10;
        at -= 1;
    }
    // SAFETY: both calls are async-signal-safe, and the text lives on this stack.
    unsafe {
        libc::write(2, text.as_ptr().cast(), text.len());
        libc::_exit(FORBIDDEN_CALL_STATUS);
    }
}

/// The exit status of a process that made a system call its filter forbids.
pub const FORBIDDEN_CALL_STATUS: i32 = 148;

/// Makes a system call that a filter traps end the process with [`FORBIDDEN_CALL_STATUS`] and a line that
/// names the call.
pub fn install_forbidden_call_handler() -> io::Result<()> {
    // SAFETY: the structure is plain data, zero is a valid value of every field, and the handler makes
    // async-signal-safe calls only.
    let rc = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_forbidden_call as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut())
    };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
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
