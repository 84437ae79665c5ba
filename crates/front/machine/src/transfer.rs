//! The transfer disk: the fast way for large files into the machine.
//!
//! The emulated network carries a few megabytes per second, a disk a hundred. The machine sees a read-only
//! disk of fixed size. The host writes a tar archive to the start of the disk and tells the machine how many
//! blocks to read.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::error::{MachineError, file};
use crate::layout::Layout;
use crate::lock::MachineLock;

/// Upper bound on one copy. The file is sparse.
const SIZE: u64 = 8 << 30;
/// Size of one read by the machine.
const BLOCK: u64 = 1 << 20;

/// A file or folder to copy.
#[derive(Debug, Clone)]
pub struct Parcel {
    pub from: PathBuf,
    /// Name below the target folder.
    pub to: PathBuf,
}

/// The host's side of the transfer disk.
#[derive(Debug, Clone)]
pub struct Transfer {
    disk: PathBuf,
    lock: PathBuf,
}

/// Creates the disk for a new start of a machine.
pub fn create_disk(path: &Path) -> Result<(), MachineError> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .and_then(|disk| disk.set_len(SIZE))
        .map_err(file("create", path))
}

/// Number of blocks that the machine has to read.
pub fn blocks(length: u64) -> u64 {
    length.div_ceil(BLOCK)
}

impl Transfer {
    pub fn of(layout: &Layout) -> Self {
        Self {
            disk: layout.transfer_disk(),
            lock: layout.transfer_lock(),
        }
    }

    /// Takes the lock: one copy at a time.
    pub async fn lock(&self) -> Result<MachineLock, MachineError> {
        MachineLock::take(&self.lock, || {}).await
    }

    /// Writes an archive of the parcels to the disk and returns its length. The caller holds the lock.
    pub async fn fill(&self, parcels: Vec<Parcel>) -> Result<u64, MachineError> {
        let path = self.disk.clone();
        let filled = tokio::task::spawn_blocking(move || {
            // Without truncation: the machine has the disk open.
            let mut disk = OpenOptions::new().write(true).open(&path)?;
            // Holes instead of what an earlier copy left.
            rustix::fs::fallocate(
                &disk,
                rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE,
                0,
                SIZE,
            )?;
            disk.seek(SeekFrom::Start(0))?;
            pack(disk, &parcels)
        })
        .await
        .map_err(io::Error::other)
        .flatten();
        filled.map_err(file("fill", &self.disk))
    }
}

fn pack(disk: File, parcels: &[Parcel]) -> io::Result<u64> {
    let mut archive = tar::Builder::new(Limited { disk, written: 0 });
    archive.follow_symlinks(false);
    for Parcel { from, to } in parcels {
        if from.is_dir() {
            archive.append_dir_all(to, from)?;
        } else {
            archive.append_file(to, &mut File::open(from)?)?;
        }
    }
    Ok(archive.into_inner()?.written)
}

/// A writer that fails at the end of the disk.
struct Limited {
    disk: File,
    written: u64,
}

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.written + bytes.len() as u64 > SIZE {
            return Err(io::Error::other("more than 8 GiB at once"));
        }
        let length = self.disk.write(bytes)?;
        self.written += length as u64;
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.disk.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    #[tokio::test]
    async fn what_is_on_the_disk_is_the_last_archive_only() {
        let dir = tempfile::tempdir().unwrap();
        let transfer = Transfer {
            disk: dir.path().join("disk"),
            lock: dir.path().join("lock"),
        };
        create_disk(&transfer.disk).unwrap();
        let program = dir.path().join("program");
        fs::write(&program, vec![7; 3 << 20]).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let parcel = Parcel {
            from: program,
            to: "p".into(),
        };
        let length = transfer.fill(vec![parcel]).await.unwrap();
        assert!(blocks(length) >= 4, "{length}");

        let folder = dir.path().join("folder");
        fs::create_dir_all(folder.join("deep")).unwrap();
        fs::write(folder.join("deep/file"), "content").unwrap();
        std::os::unix::fs::symlink("deep/file", folder.join("link")).unwrap();
        let parcel = Parcel {
            from: folder,
            to: ".".into(),
        };
        assert_eq!(blocks(transfer.fill(vec![parcel]).await.unwrap()), 1);

        let disk = fs::metadata(&transfer.disk).unwrap();
        assert_eq!(disk.len(), SIZE);
        assert!(
            disk.blocks() * 512 < 1 << 20,
            "the first archive still takes room"
        );
        let out = dir.path().join("out");
        tar::Archive::new(File::open(&transfer.disk).unwrap())
            .unpack(&out)
            .unwrap();
        assert_eq!(
            fs::read_to_string(out.join("deep/file")).unwrap(),
            "content"
        );
        assert_eq!(
            fs::read_link(out.join("link")).unwrap(),
            Path::new("deep/file")
        );
    }
}
