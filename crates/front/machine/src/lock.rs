//! The lock that serialises start, stop and removal of a machine.
//!
//! The lock is an advisory file lock. The kernel releases it when the process dies. The holder may remove the
//! lock file, so a waiter checks after locking that its file is still the one at the path.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::error::{MachineError, file};

/// The lock is held until the value is dropped.
#[derive(Debug)]
pub struct MachineLock {
    _file: File,
}

impl MachineLock {
    /// Takes the lock. Calls `on_wait` before it blocks.
    pub async fn take(path: &Path, on_wait: impl Fn()) -> Result<Self, MachineError> {
        loop {
            let lock = Self::take_file(path, &on_wait).await?;
            // The previous holder may have removed the file. The next process then creates a new one, and the lock
            // on the old file excludes no one.
            if is_at(&lock, path) {
                return Ok(Self { _file: lock });
            }
        }
    }

    async fn take_file(path: &Path, on_wait: impl Fn()) -> Result<File, MachineError> {
        let lock = open(path)?;
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::WouldBlock) => on_wait(),
            Err(TryLockError::Error(source)) => return Err(file("lock", path)(source)),
        }
        let waiting = tokio::task::spawn_blocking(move || lock.lock().map(|()| lock));
        match waiting.await {
            Ok(result) => result.map_err(file("lock", path)),
            Err(join) => Err(file("lock", path)(std::io::Error::other(join))),
        }
    }
}

fn is_at(lock: &File, path: &Path) -> bool {
    match (lock.metadata(), std::fs::metadata(path)) {
        (Ok(held), Ok(there)) => (held.dev(), held.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

fn open(path: &Path) -> Result<File, MachineError> {
    if let Some(parent) = path.parent() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(parent)
            .map_err(file("create", parent))?;
    }
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path)
        .map_err(file("open", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[tokio::test]
    async fn the_second_waits_until_the_first_lets_go() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub/lock");
        let first = MachineLock::take(&path, || panic!("the lock is free"))
            .await
            .unwrap();
        let waited = AtomicBool::new(false);
        let second = MachineLock::take(&path, || waited.store(true, Ordering::SeqCst));
        tokio::pin!(second);
        // Polled once: it has found the lock taken and waits.
        assert!(futures_poll(second.as_mut()).await.is_none());
        assert!(waited.load(Ordering::SeqCst));
        drop(first);
        second.await.unwrap();
    }

    #[tokio::test]
    async fn a_removed_lock_file_is_not_taken_for_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let first = MachineLock::take(&path, || {}).await.unwrap();
        let second = MachineLock::take(&path, || {});
        tokio::pin!(second);
        assert!(futures_poll(second.as_mut()).await.is_none());
        std::fs::remove_file(&path).unwrap();
        drop(first);
        let held = second.await.unwrap();
        assert!(is_at(&held._file, &path));
    }

    async fn futures_poll<F: Future>(future: std::pin::Pin<&mut F>) -> Option<F::Output> {
        tokio::select! {
            biased;
            output = future => Some(output),
            () = std::future::ready(()) => None,
        }
    }
}
