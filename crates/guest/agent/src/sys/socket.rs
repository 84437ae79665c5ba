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

/// Breaks a TCP connection without a packet to the peer. Processes that hold the socket find it aborted.
pub fn break_connection(socket: &OwnedFd) -> io::Result<()> {
    let on: libc::c_int = 1;
    let length = libc::socklen_t::try_from(size_of::<libc::c_int>()).unwrap_or(4);
    // SAFETY: the option is a live integer of the length that is given. A socket under repair sends nothing.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_REPAIR,
            (&raw const on).cast(),
            length,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: an all-zero address is valid and its family then says "none"; the length is that of the type.
    let result = unsafe {
        let address: libc::sockaddr = std::mem::zeroed();
        let length = libc::socklen_t::try_from(size_of::<libc::sockaddr>()).unwrap_or(16);
        libc::connect(socket.as_raw_fd(), &raw const address, length)
    };
    let broken = if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    };
    let off: libc::c_int = 0;
    // SAFETY: as above. A socket left under repair could never connect again.
    unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_REPAIR,
            (&raw const off).cast(),
            length,
        );
    }
    broken
}
