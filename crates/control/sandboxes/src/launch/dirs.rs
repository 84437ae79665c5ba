//! The files of each VM: disk layers, console output and the socket of the guest.
//!
//! [`Dirs`] knows every path and makes and removes the files. A file that a daemon left when it died is replaced.
//! Sockets have a directory of their own, because the path of a socket has at most 108 bytes.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use forkd_api::ErrorCode;
use forkd_formats::layer::LayerHeader;
use forkd_types::SandboxId;

use crate::error::Error;

/// Where a VM's files go.
#[derive(Debug, Clone)]
pub struct Dirs {
    /// One directory a VM: disk layers and the console.
    pub data: PathBuf,
    /// Sockets. The path is short: a socket's name has 108 bytes.
    pub run: PathBuf,
}

/// A disk that needs a new writable layer.
#[derive(Debug, Clone, Copy)]
pub struct NewDisk {
    pub slot: usize,
    /// Size of the disk in bytes.
    pub size: u64,
}

/// A new, empty layer of a disk.
#[derive(Debug)]
pub struct NewLayer {
    /// The slot of the disk.
    pub slot: usize,
    /// The name of the file in the VM's directory.
    pub name: String,
    /// The file, open for reading and writing.
    pub file: File,
}

/// The open files that a VM starts with.
#[derive(Debug)]
pub struct VmFiles {
    /// Its socket device.
    pub vsock: UnixListener,
    pub console: File,
    /// New layers of writable disks, in the order of their slots.
    pub layers: Vec<NewLayer>,
}

impl Dirs {
    /// The directory of a VM.
    pub fn vm(&self, id: &SandboxId) -> PathBuf {
        self.data.join(id.as_str())
    }

    /// The socket through which the guest is reached.
    pub fn vsock(&self, id: &SandboxId) -> PathBuf {
        self.run.join(format!("{id}.sock"))
    }

    /// The console output.
    pub fn console(&self, id: &SandboxId) -> PathBuf {
        self.vm(id).join("console.log")
    }

    /// Makes the directory, the console and the socket of a VM; the caller adds layers.
    pub fn create(&self, id: &SandboxId) -> Result<VmFiles, Error> {
        let dir = self.vm(id);
        std::fs::create_dir(&dir).map_err(Error::io("create", &dir))?;
        Ok(VmFiles {
            vsock: self.listen(id)?,
            console: self.open_console(id)?,
            layers: Vec::new(),
        })
    }

    /// The console, opened for appending.
    pub fn open_console(&self, id: &SandboxId) -> Result<File, Error> {
        let path = self.console(id);
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(Error::io("create", &path))
    }

    /// A new socket, in place of one that an earlier VM of this id may have left.
    pub fn listen(&self, id: &SandboxId) -> Result<UnixListener, Error> {
        let path = self.vsock(id);
        remove_left(&path)?;
        UnixListener::bind(&path).map_err(Error::io("listen on", &path))
    }

    /// A new empty layer; `number` tells it from earlier ones of the same disk. The record never lacks a layer that is in
    /// use, so a file of that name is what a daemon that died left, and goes.
    pub fn new_layer(
        &self,
        id: &SandboxId,
        disk: NewDisk,
        number: usize,
        max_bytes: u64,
    ) -> Result<NewLayer, Error> {
        let name = format!("disk{}-{number}.layer", disk.slot);
        let path = self.vm(id).join(&name);
        let layer = LayerHeader::new(disk.size, max_bytes).map_err(|error| {
            Error::refused(
                ErrorCode::SnapshotBroken,
                format!("disk {}: {error}", disk.slot),
            )
        })?;
        remove_left(&path)?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .map_err(Error::io("create", &path))?;
        let written = file
            .write_all_at(&layer.encode(), 0)
            .and_then(|()| file.set_len(layer.file_len()));
        if let Err(error) = written {
            gone(std::fs::remove_file(&path), &path);
            return Err(Error::io("write", &path)(error));
        }
        Ok(NewLayer {
            slot: disk.slot,
            name,
            file,
        })
    }

    /// Removes everything of a VM. Files that cannot be removed now are removed at the next start.
    pub fn remove(&self, id: &SandboxId) {
        let socket = self.vsock(id);
        gone(std::fs::remove_file(&socket), &socket);
        let dir = self.vm(id);
        gone(std::fs::remove_dir_all(&dir), &dir);
    }

    /// The ids that have files here.
    pub fn list(&self) -> Result<Vec<SandboxId>, Error> {
        let mut all = Vec::new();
        for entry in std::fs::read_dir(&self.data).map_err(Error::io("read", &self.data))? {
            let name = entry.map_err(Error::io("read", &self.data))?.file_name();
            all.extend(
                name.to_str()
                    .and_then(|name| name.parse::<SandboxId>().ok()),
            );
        }
        for entry in std::fs::read_dir(&self.run).map_err(Error::io("read", &self.run))? {
            let name = entry.map_err(Error::io("read", &self.run))?.file_name();
            all.extend(
                name.to_str()
                    .and_then(|name| name.strip_suffix(".sock"))
                    .and_then(|name| name.parse::<SandboxId>().ok()),
            );
        }
        all.sort();
        all.dedup();
        Ok(all)
    }
}

/// Makes room for a new file.
fn remove_left(path: &Path) -> Result<(), Error> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// Says in the log what could not be removed.
fn gone(result: io::Result<()>, path: &Path) {
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "not removed");
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_that_a_dead_daemon_left_is_in_nobodys_way() {
        let dir = tempfile::tempdir().unwrap();
        let dirs = Dirs {
            data: dir.path().to_owned(),
            run: dir.path().to_owned(),
        };
        let id: SandboxId = "sb-1".parse().unwrap();
        std::fs::create_dir(dirs.vm(&id)).unwrap();
        let disk = NewDisk {
            slot: 0,
            size: 1 << 20,
        };
        let make = || dirs.new_layer(&id, disk, 3, 0).unwrap();
        let old = make();
        old.file.write_all_at(b"half", 0).unwrap();
        let new = make();
        assert_eq!(old.name, new.name);
        let mut head = [0; 4];
        new.file.read_exact_at(&mut head, 0).unwrap();
        assert_ne!(&head, b"half");
    }
}
