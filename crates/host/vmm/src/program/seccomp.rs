//! Which system calls each thread may make from the moment it has what it needs.

use seccompiler::{BpfProgram, apply_filter, sock_filter};
use thiserror::Error;

use crate::machine::ThreadKind;

const VCPU: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/vcpu.bpf"));
const DEVICES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/devices.bpf"));
const DISKS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/disks.bpf"));
const CONTROL: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/control.bpf"));

/// The filter was not taken.
#[derive(Debug, Error)]
#[error("cannot restrict the system calls of a thread")]
pub struct FilterError(#[source] seccompiler::Error);

fn program(bytes: &[u8]) -> BpfProgram {
    bytes
        .as_chunks::<8>()
        .0
        .iter()
        .map(|&[c0, c1, jt, jf, k0, k1, k2, k3]| sock_filter {
            code: u16::from_le_bytes([c0, c1]),
            jt,
            jf,
            k: u32::from_le_bytes([k0, k1, k2, k3]),
        })
        .collect()
}

/// Restricts the calling thread to what its kind needs.
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
    use forkd_sys::{ChildWriter, FORBIDDEN_CALL_STATUS, install_forbidden_call_handler};

    use super::*;

    fn status_under(bytes: &[u8], call: impl FnOnce()) -> u8 {
        install_forbidden_call_handler().unwrap();
        let program = program(bytes);
        let child = ChildWriter::fork(|| {
            if apply_filter(&program).is_err() {
                return 1;
            }
            call();
            0
        })
        .unwrap();
        child.wait().unwrap()
    }

    #[test]
    fn what_is_not_listed_ends_the_process() {
        for bytes in [VCPU, DEVICES, DISKS, CONTROL] {
            assert_eq!(status_under(bytes, || {}), 0);
            let forbidden = status_under(bytes, || {
                let _ = rustix::process::getuid();
            });
            assert_eq!(i32::from(forbidden), FORBIDDEN_CALL_STATUS);
        }
    }

    #[test]
    fn only_the_device_thread_makes_sockets_and_only_the_disk_thread_syncs() {
        let make_sockets = || {
            let _ = rustix::net::socketpair(
                rustix::net::AddressFamily::UNIX,
                rustix::net::SocketType::STREAM,
                rustix::net::SocketFlags::empty(),
                None,
            );
        };
        assert_eq!(status_under(DEVICES, make_sockets), 0);
        for bytes in [VCPU, DISKS] {
            let status = status_under(bytes, make_sockets);
            assert_eq!(i32::from(status), FORBIDDEN_CALL_STATUS);
        }
        let file = tempfile::tempfile().unwrap();
        let sync = || {
            let _ = rustix::fs::fdatasync(&file);
        };
        assert_eq!(status_under(DISKS, sync), 0);
        for bytes in [VCPU, DEVICES] {
            let status = status_under(bytes, sync);
            assert_eq!(i32::from(status), FORBIDDEN_CALL_STATUS);
        }
    }
}
