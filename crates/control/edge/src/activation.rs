//! Sockets that systemd opened.

use std::os::fd::{OwnedFd, RawFd};

use anyhow::{Context, bail};
use rustix::net::{AddressFamily, sockopt};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use crate::listen::Bound;

/// How many sockets were handed over.
pub fn count() -> usize {
    sd_notify::listen_fds().map_or(0, |fds| fds.len())
}

/// The sockets that were handed over. One that other machines reach needs a token.
pub fn sockets(has_token: bool) -> anyhow::Result<Vec<Bound>> {
    let fds = sd_notify::listen_fds().context("the sockets of systemd cannot be used")?;
    fds.map(|fd| {
        bound(own(fd)?, has_token).with_context(|| format!("socket {fd} of systemd cannot be used"))
    })
    .collect()
}

/// A descriptor of our own for one that is only a number. Asking the kernel for a copy is safe where claiming the
/// number is not.
fn own(fd: RawFd) -> anyhow::Result<OwnedFd> {
    let this = pidfd_open(getpid(), PidfdFlags::empty())?;
    Ok(pidfd_getfd(&this, fd, PidfdGetfdFlags::empty())?)
}

fn bound(socket: OwnedFd, has_token: bool) -> anyhow::Result<Bound> {
    if sockopt::socket_domain(&socket)? == AddressFamily::UNIX {
        let listener = std::os::unix::net::UnixListener::from(socket);
        listener.set_nonblocking(true)?;
        return Ok(Bound::Unix(tokio::net::UnixListener::from_std(listener)?));
    }
    let listener = std::net::TcpListener::from(socket);
    let address = listener.local_addr()?;
    if !address.ip().is_loopback() && !has_token {
        bail!(
            "{address} can be reached from other machines and there is no token: give --token-file"
        );
    }
    listener.set_nonblocking(true)?;
    Ok(Bound::Tcp(tokio::net::TcpListener::from_std(listener)?))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[tokio::test]
    async fn a_socket_is_taken_by_its_number() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let taken = bound(own(listener.as_raw_fd()).unwrap(), false).unwrap();
        drop(listener);
        assert!(std::net::TcpStream::connect(address).is_ok());
        assert!(matches!(taken, Bound::Tcp(_)));
    }

    #[tokio::test]
    async fn a_door_without_a_lock_is_refused() {
        let listener = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
        assert!(bound(own(listener.as_raw_fd()).unwrap(), false).is_err());
        assert!(bound(own(listener.as_raw_fd()).unwrap(), true).is_ok());
    }
}
