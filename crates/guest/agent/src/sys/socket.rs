//! Sockets of other processes.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Duplicates a descriptor of another process.
pub fn take_descriptor(pidfd: &OwnedFd, number: i32) -> io::Result<OwnedFd> {
    // SAFETY: plain numbers; the result is a new descriptor without another owner.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), number, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(
            i32::try_from(fd).map_err(|_| io::ErrorKind::InvalidData)?,
        ))
    }
}

/// Ends the repair of a socket without a segment to the peer.
const REPAIR_OFF: libc::c_int = -1;
/// Selects the bytes from the peer, or none, in a socket under repair.
const RECEIVED: libc::c_int = 1;
const NO_QUEUE: libc::c_int = 0;

fn set_tcp(socket: &OwnedFd, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let length = libc::socklen_t::try_from(size_of::<libc::c_int>()).unwrap_or(4);
    // SAFETY: the value is a live integer of the length that is given.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            (&raw const value).cast(),
            length,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The sequence number that a connection expects next from its peer. A socket under repair sends nothing.
pub fn expected_sequence(socket: &OwnedFd) -> io::Result<u32> {
    set_tcp(socket, libc::TCP_REPAIR, 1)?;
    let mut sequence: u32 = 0;
    let mut length = libc::socklen_t::try_from(size_of::<u32>()).unwrap_or(4);
    let selected = set_tcp(socket, libc::TCP_REPAIR_QUEUE, RECEIVED);
    // SAFETY: value and length are live, and the length is that of the value.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_QUEUE_SEQ,
            (&raw mut sequence).cast(),
            &raw mut length,
        )
    };
    let read = match result {
        0 => Ok(sequence),
        _ => Err(io::Error::last_os_error()),
    };
    // A socket left under repair could neither send nor close in order.
    let _ = set_tcp(socket, libc::TCP_REPAIR_QUEUE, NO_QUEUE);
    set_tcp(socket, libc::TCP_REPAIR, REPAIR_OFF)?;
    selected.and(read)
}

/// Breaks a TCP connection without a packet to the peer. A process that polls the socket finds it aborted; a process
/// that waits inside `recv` gets "broken pipe" from recent kernels.
pub fn break_connection(socket: &OwnedFd) -> io::Result<()> {
    set_tcp(socket, libc::TCP_REPAIR, 1)?;
    // SAFETY: an all-zero address is valid and its family then says "none"; the length is that of the type.
    let result = unsafe {
        let address: libc::sockaddr = std::mem::zeroed();
        let length = libc::socklen_t::try_from(size_of::<libc::sockaddr>()).unwrap_or(16);
        libc::connect(socket.as_raw_fd(), &raw const address, length)
    };
    let broken = match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // A socket left under repair could never connect again. If this fails, the connection is broken all the same.
    let _ = set_tcp(socket, libc::TCP_REPAIR, 0);
    broken
}
