//! Listening sockets of the programs that outlive the daemon.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use thiserror::Error;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 16;

/// Why a program cannot listen.
#[derive(Debug, Error)]
pub enum ListenError {
    #[error("another process listens on {}", path.display())]
    InUse { path: PathBuf },
    #[error("cannot {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Listens on a `SOCK_SEQPACKET` socket at the path, and replaces a socket that no process listens on any more.
pub fn listen_on(path: &Path) -> Result<OwnedFd, ListenError> {
    let failed = |action, source| ListenError::Io {
        action,
        path: path.to_owned(),
        source,
    };
    let address =
        SocketAddrUnix::new(path).map_err(|error| failed("use as a socket", error.into()))?;
    let new = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let made = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        made.map_err(|error| failed("make a socket for", error.into()))
    };
    // A full queue of connections belongs to a process that listens.
    if matches!(connect(new()?, &address), Ok(()) | Err(Errno::AGAIN)) {
        return Err(ListenError::InUse {
            path: path.to_owned(),
        });
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(failed("replace", error));
        }
        _ => {}
    }
    let listener = new()?;
    bind(&listener, &address).map_err(|error| failed("bind", error.into()))?;
    listen(&listener, BACKLOG).map_err(|error| failed("listen on", error.into()))?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_without_a_listener_is_replaced_and_one_with_a_listener_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let first = listen_on(&path).unwrap();
        assert!(matches!(listen_on(&path), Err(ListenError::InUse { .. })));
        drop(first);
        listen_on(&path).unwrap();
        let long = folder.path().join("x".repeat(200));
        assert!(matches!(listen_on(&long), Err(ListenError::Io { .. })));
    }
}
