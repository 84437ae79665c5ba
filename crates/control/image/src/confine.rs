//! Confines this process before it reads a byte of a stranger: two folders, the network, and no rights.
//!
//! A mistake in a parser then reaches neither the daemon's database nor its sockets, nor files of the host.

use std::path::Path;

use forkd_sys::jail::{self, JailError};
use rustix::process::{Resource, Rlimit, setrlimit};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
use thiserror::Error;

/// Readable besides the two folders: programs, libraries, and what it takes to find and trust a registry.
const READABLE: [&str; 16] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/etc/ssl",
    "/etc/ca-certificates",
    "/etc/ld.so.cache",
    "/etc/hosts",
    "/etc/resolv.conf",
    "/run/systemd/resolve",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/host.conf",
    "/etc/mke2fs.conf",
    "/dev/urandom",
];
/// System calls that a reader of archives never needs, and an attacker does.
const DENIED: [i64; 36] = [
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_kill,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsmount,
    libc::SYS_fsconfig,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_mknod,
    libc::SYS_mknodat,
    libc::SYS_quotactl,
];
/// The tree of an image with two million entries needs less than half of it.
const MEMORY: u64 = 4 << 30;
/// An unpacked image, and the disk that it becomes.
const FILE: u64 = 130 << 30;
const FILES: u64 = 1024;

/// A wall that could not be put up.
#[derive(Debug, Error)]
pub enum ConfineError {
    #[error("cannot limit what the process may use")]
    Limit(#[source] rustix::io::Errno),
    #[error("cannot confine the process")]
    Jail(#[from] JailError),
    #[error("cannot deny system calls")]
    Calls(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Confines the process, which must have one thread. `readable` are files that it needs besides the usual ones.
pub fn confine(writable: &[&Path], readable: &[&Path]) -> Result<(), ConfineError> {
    for (resource, most) in [
        (Resource::Core, 0),
        (Resource::Data, MEMORY),
        (Resource::Fsize, FILE),
        (Resource::Nofile, FILES),
    ] {
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        setrlimit(resource, limit).map_err(ConfineError::Limit)?;
    }
    jail::drop_rights()?;
    let usual = READABLE.iter().map(Path::new);
    let readable: Vec<&Path> = usual.chain(readable.iter().copied()).collect();
    let null = Path::new("/dev/null");
    let writable: Vec<&Path> = writable.iter().copied().chain([null]).collect();
    jail::confine_paths(&readable, &writable)?;
    deny_calls().map_err(ConfineError::Calls)
}

fn deny_calls() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let rules = DENIED.iter().map(|call| (*call, Vec::new())).collect();
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM as u32),
        TargetArch::x86_64,
    )?;
    let program: BpfProgram = filter.try_into()?;
    Ok(seccompiler::apply_filter(&program)?)
}
