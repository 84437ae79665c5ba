//! Moves a process's output from its descriptor into its log.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use forkd_guest_proto::frame::DATA_CHUNK;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

use super::log::Log;

/// Says to the pumps of a process that the process itself is gone.
#[derive(Default)]
pub struct Gone {
    gone: Cell<bool>,
    notify: Notify,
}

impl Gone {
    pub fn set(&self) {
        self.gone.set(true);
        self.notify.notify_waiters();
    }

    async fn wait(&self) {
        while !self.gone.get() {
            self.notify.notified().await;
        }
    }
}

/// Reads until the end of output, or until everything that the process itself has written is in the log;
/// what its descendants still write through the same descriptor is then thrown away, so that they neither
/// block nor die of it. `done` is told when the log has ended; `count` sees every new total.
pub async fn pump(
    fd: Rc<AsyncFd<OwnedFd>>,
    log: Rc<Log>,
    gone: Rc<Gone>,
    mut count: impl FnMut(usize),
) {
    let mut left = None;
    loop {
        let room = log.wait_for_room().await.min(DATA_CHUNK);
        if left.is_none() && gone.gone.get() {
            left = Some(rustix::io::ioctl_fionread(fd.get_ref()).unwrap_or(0));
        }
        let limit = match left {
            Some(0) => break,
            Some(left) => room.min(usize::try_from(left).unwrap_or(usize::MAX)),
            None => room,
        };
        let bytes = tokio::select! {
            bytes = read(&fd, limit) => bytes,
            () = gone.wait(), if left.is_none() => continue,
        };
        let Ok(bytes) = bytes else { break };
        if bytes.is_empty() {
            log.end();
            return;
        }
        left = left.map(|left| left.saturating_sub(bytes.len() as u64));
        count(bytes.len());
        log.push(&bytes);
    }
    log.end();
    while read(&fd, DATA_CHUNK)
        .await
        .is_ok_and(|bytes| !bytes.is_empty())
    {}
}

/// Reads what is there; nothing at the end.
pub async fn read(fd: &AsyncFd<OwnedFd>, limit: usize) -> io::Result<Vec<u8>> {
    loop {
        let mut ready = fd.readable().await?;
        // Space is taken only once there is something to read: most descriptors are silent most of the time.
        let mut bytes = Vec::with_capacity(limit);
        let result = ready.try_io(|fd| {
            Ok(rustix::io::read(
                fd,
                rustix::buffer::spare_capacity(&mut bytes),
            )?)
        });
        match result {
            Ok(Ok(_)) => return Ok(bytes),
            Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(Err(error)) => return Err(error),
            Err(_would_block) => {}
        }
    }
}

/// Writes all of it.
pub async fn write_all(fd: &AsyncFd<OwnedFd>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let mut ready = fd.writable().await?;
        match ready.try_io(|fd| Ok(rustix::io::write(fd.as_fd(), bytes)?)) {
            Ok(Ok(count)) => bytes = bytes.get(count..).unwrap_or_default(),
            Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(Err(error)) => return Err(error),
            Err(_would_block) => {}
        }
    }
    Ok(())
}
