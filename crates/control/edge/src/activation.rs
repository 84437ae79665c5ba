//! Socket activation and the watchdog of systemd.
//!
//! [`sockets`] takes the sockets that systemd opened; one that other machines can reach is refused without a token.
//! [`keep_watchdog_quiet`] reports to the watchdog while the daemon is healthy.

use std::os::fd::{OwnedFd, RawFd};

use anyhow::{Context, bail};
use rustix::net::{AddressFamily, sockopt};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use tokio_util::sync::CancellationToken;

use crate::listen::Bound;
use forkd_sandboxes::health::Health;

/// How many sockets systemd handed over.
pub fn count() -> usize {
    sd_notify::listen_fds().map_or(0, |fds| fds.len())
}

/// The sockets that systemd handed over. A socket that other machines can reach is refused without a token.
pub fn sockets(has_token: bool) -> anyhow::Result<Vec<Bound>> {
    let fds = sd_notify::listen_fds().context("the sockets of systemd cannot be used")?;
    fds.map(|fd| {
        bound(own(fd)?, has_token).with_context(|| format!("socket {fd} of systemd cannot be used"))
    })
    .collect()
}

/// An owned copy of a descriptor that is known by its number. Claiming the number itself would need `unsafe`.
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

/// Tells systemd's watchdog that the daemon is well. systemd restarts a daemon that is not; sandboxes outlive that.
pub async fn keep_watchdog_quiet(health: Health, stop: CancellationToken) {
    let Some(limit) = sd_notify::watchdog_enabled() else {
        return;
    };
    let mut ticks = tokio::time::interval(limit / 3);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = stop.cancelled() => return,
        }
        let problems = health.problems().await;
        if problems.is_empty() {
            let _ = sd_notify::notify(&[sd_notify::NotifyState::Watchdog]);
        }
        for problem in problems.iter() {
            tracing::error!(%problem, "not well");
        }
    }
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
