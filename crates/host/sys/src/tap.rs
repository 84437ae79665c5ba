//! Tap devices: network interfaces whose other end is a descriptor.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

/// The length of the header before each frame: `virtio_net_hdr_v1`.
const HEADER: libc::c_int = 12;

/// Makes a tap device in the caller's network namespace, or opens the one of that name. A virtio header of 12 bytes
/// precedes each frame. The descriptor does not block.
pub fn open_tap(name: &str) -> io::Result<OwnedFd> {
    let tap = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open("/dev/net/tun")?;
    // SAFETY: the structure is plain data, and zero is a valid value of every field.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero and ends the name.
    if name.is_empty() || name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = i16::try_from(flags).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the request takes an `ifreq`, which lives until after the call.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF, &raw const request) })?;
    set_header(&tap)?;
    Ok(tap.into())
}

/// Lets a tap device give and take TCP frames of up to 64 KiB, without checksums.
pub fn take_large_frames(tap: &OwnedFd) -> io::Result<()> {
    let offloads = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
    // SAFETY: the request takes a number, not a pointer.
    check(unsafe {
        libc::ioctl(
            tap.as_raw_fd(),
            libc::TUNSETOFFLOAD,
            libc::c_ulong::from(offloads),
        )
    })
}

fn set_header(tap: &File) -> io::Result<()> {
    let length = HEADER;
    // SAFETY: the request takes a pointer to an int, which lives until after the call.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const length) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_does_not_fit_is_refused() {
        for name in ["", "a-name-far-too-long-for-an-interface"] {
            // Without the device there is nothing to ask for a name.
            match open_tap(name) {
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
                other => panic!("{name:?}: {other:?}"),
            }
        }
    }
}
