//! The directory as a whole: its lock, its format version, leftovers of an earlier daemon.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

use forkd_types::path_error;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::durable;
use crate::error::StoreError;
use crate::layout::Layout;

/// Version of the directory. Another version is refused: nothing converts one.
const FORMAT: u32 = 2;

#[derive(Debug, Serialize, Deserialize)]
struct FormatFile {
    format: u32,
}

pub fn take_lock(layout: &Layout) -> Result<File, StoreError> {
    let path = layout.lock_file();
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(path_error("open", &path))?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|_| StoreError::InUse {
        path: layout.root().to_owned(),
    })?;
    Ok(file)
}

pub fn check_format(layout: &Layout) -> Result<(), StoreError> {
    let path = layout.format_file();
    match std::fs::read(&path) {
        Ok(bytes) => {
            let found = serde_json::from_slice::<FormatFile>(&bytes).map_or(0, |file| file.format);
            if found == FORMAT {
                Ok(())
            } else {
                Err(StoreError::Format {
                    path: layout.root().to_owned(),
                    found,
                    known: FORMAT,
                })
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let text = serde_json::to_vec(&FormatFile { format: FORMAT }).unwrap_or_default();
            let temporary = path.with_extension("new");
            let _ = std::fs::remove_file(&temporary);
            durable::write_new(&temporary, &text)?;
            std::fs::rename(&temporary, &path).map_err(path_error("create", &path))?;
            Ok(durable::sync_dir(layout.root())?)
        }
        Err(error) => Err(path_error("read", path)(error).into()),
    }
}

pub fn empty(dir: &Path) -> Result<(), StoreError> {
    for entry in std::fs::read_dir(dir).map_err(path_error("read", dir))? {
        let path = entry.map_err(path_error("read", dir))?.path();
        let removed = if path.is_dir() {
            std::fs::remove_dir_all(&path)
        } else {
            std::fs::remove_file(&path)
        };
        removed.map_err(path_error("remove", &path))?;
    }
    Ok(())
}
