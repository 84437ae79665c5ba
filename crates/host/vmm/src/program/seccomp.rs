//! The system call filter of each kind of thread.
//!
//! `resources/seccomp/forkd-vmm.json` lists the calls, most with the arguments they may have. The build
//! script compiles the list, so an invalid one fails the build. A call outside the filter kills the process
//! in a release build; in a debug build it traps, and the handler names the call.
//!
//! Filters are per thread, but the threads share one address space: judge an escape by their union.

use rustix::process::getpid;
use seccompiler::{BpfProgram, apply_filter, sock_filter};
use thiserror::Error;

use crate::machine::ThreadKind;

const VCPU: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/vcpu.bpf"));
const DEVICES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/devices.bpf"));
const DISKS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/disks.bpf"));
const CONTROL: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/control.bpf"));

/// Stands in the compiled filters for the ID of this process, to which signals are restricted.
const OWN_PROCESS: u32 = 0x7fff_fffe;

/// A filter could not be installed.
#[derive(Debug, Error)]
#[error("cannot restrict the system calls of a thread")]
pub struct FilterError(#[source] seccompiler::Error);

/// A compiled filter for this process.
fn program(bytes: &[u8]) -> BpfProgram {
    let own = getpid().as_raw_pid().cast_unsigned();
    bytes
        .as_chunks::<8>()
        .0
        .iter()
        .map(|&[c0, c1, jt, jf, k0, k1, k2, k3]| sock_filter {
            code: u16::from_le_bytes([c0, c1]),
            jt,
            jf,
            k: match u32::from_le_bytes([k0, k1, k2, k3]) {
                OWN_PROCESS => own,
                value => value,
            },
        })
        .collect()
}

/// The filters of all kinds of threads.
pub(super) fn programs() -> [BpfProgram; 4] {
    [VCPU, DEVICES, DISKS, CONTROL].map(program)
}

/// Restricts the calling thread to the calls of its kind.
pub fn restrict(kind: ThreadKind) -> Result<(), FilterError> {
    let bytes = match kind {
        ThreadKind::Vcpu => VCPU,
        ThreadKind::Devices => DEVICES,
        ThreadKind::Disks => DISKS,
    };
    apply_filter(&program(bytes)).map_err(FilterError)
}

/// Restricts the control thread; to be called once the shell exists.
pub fn restrict_control() -> Result<(), FilterError> {
    apply_filter(&program(CONTROL)).map_err(FilterError)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use forkd_sys::filter_probe::{
        make_page_executable, map_executable_page, map_writable_page, signal_thread,
    };
    use forkd_sys::{
        ChildWriter, FORBIDDEN_CALL_STATUS, ForkError, install_forbidden_call_handler,
        install_kick_handler,
    };
    use rustix::io::FdFlags;
    use rustix::process::{DumpableBehavior, Signal};

    use super::*;

    const ALL: [&[u8]; 4] = [VCPU, DEVICES, DISKS, CONTROL];
    const SIGABRT: i32 = 6;
    const SIGSYS: i32 = 31;

    /// Whether a forked process may make a call under a filter of this process. The call must not
    /// allocate.
    fn allows<R>(bytes: &[u8], call: impl FnOnce() -> R) -> bool {
        install_forbidden_call_handler().unwrap();
        let program = program(bytes);
        let child = ChildWriter::fork(|| {
            if apply_filter(&program).is_err() {
                return 1;
            }
            let _ = call();
            0
        })
        .unwrap();
        match child.wait() {
            Ok(0) => true,
            Ok(status) if i32::from(status) == FORBIDDEN_CALL_STATUS => false,
            Err(ForkError::Killed { signal: SIGSYS }) => false,
            other => panic!("the child ended with {other:?}"),
        }
    }

    #[test]
    fn what_is_not_listed_ends_the_process() {
        for bytes in ALL {
            assert!(allows(bytes, || {}));
            assert!(!allows(bytes, rustix::process::getuid));
        }
    }

    #[test]
    fn only_the_device_thread_makes_sockets_and_only_the_disk_thread_syncs() {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let make_sockets = || socketpair(family, kind, SocketFlags::empty(), None);
        assert!(allows(DEVICES, make_sockets));
        assert!(!allows(VCPU, make_sockets));
        assert!(!allows(DISKS, make_sockets));
        let file = tempfile::tempfile().unwrap();
        let sync = || rustix::fs::fdatasync(&file);
        assert!(allows(DISKS, sync));
        assert!(!allows(VCPU, sync));
        assert!(!allows(DEVICES, sync));
    }

    #[test]
    fn no_thread_makes_executable_memory() {
        for bytes in ALL {
            assert!(allows(bytes, map_writable_page));
            assert!(!allows(bytes, map_executable_page));
            assert!(!allows(bytes, make_page_executable));
        }
    }

    #[test]
    fn signals_go_to_this_process_only() {
        install_kick_handler().unwrap();
        let own = getpid().as_raw_pid();
        let kick = libc::SIGRTMIN();
        assert!(allows(CONTROL, || signal_thread(own, own, kick)));
        for bytes in ALL {
            for signal in [kick, SIGABRT] {
                assert!(!allows(bytes, || signal_thread(i32::MAX, i32::MAX, signal)));
            }
            assert!(!allows(bytes, || signal_thread(own, own, 0)));
        }
        for bytes in [VCPU, DEVICES, DISKS] {
            assert!(!allows(bytes, || signal_thread(own, own, kick)));
        }
    }

    #[test]
    fn the_handler_of_forbidden_calls_stays() {
        for bytes in ALL {
            assert!(!allows(bytes, install_forbidden_call_handler));
        }
    }

    #[test]
    fn the_control_thread_changes_no_other_process_and_not_its_own_rights() {
        let pipe = std::io::pipe().unwrap().0;
        let parent = Some(getpid());
        assert!(!allows(CONTROL, || {
            rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)
        }));
        assert!(allows(CONTROL, || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        }));
        assert!(!allows(CONTROL, || {
            rustix::process::setpriority_process(parent, 19)
        }));
        assert!(allows(CONTROL, || rustix::io::fcntl_getfd(&pipe)));
        assert!(!allows(CONTROL, || {
            rustix::io::fcntl_setfd(pipe.as_fd(), FdFlags::empty())
        }));
    }

    #[test]
    fn the_control_thread_makes_no_new_virtual_machine() {
        let Ok(kvm) = kvm_ioctls::Kvm::new() else {
            eprintln!("no /dev/kvm on this host: nothing was tested");
            return;
        };
        let vm = kvm.create_vm().unwrap();
        assert!(allows(CONTROL, || vm.get_clock()));
        assert!(!allows(CONTROL, || kvm.create_vm()));
        assert!(!allows(CONTROL, || vm.create_vcpu(0)));
    }
}
