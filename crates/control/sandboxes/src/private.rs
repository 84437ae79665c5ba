//! Directories that only the daemon's user may use.
//!
//! Guest memory, disks, consoles, the state database and the audit log lie in them, so their mode is the daemon's own
//! business and not that of the umask it was started with.

use std::fs::{DirBuilder, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;

use anyhow::{Context, bail};

/// Write permission for the group or for everyone.
const OTHERS_WRITE: u32 = 0o022;

/// Files that the daemon makes are its user's alone. First in `main`: the mask belongs to the process.
pub fn restrict_umask() {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
}

/// Makes a directory that no other user may enter, or takes the rights of other users away.
pub fn private_dir(dir: &Path) -> anyhow::Result<()> {
    restricted_dir(dir, 0o700)
}

/// The same for a directory that may hold the API's socket: others may pass through to a file that they can open, but
/// not list it.
pub fn passage_dir(dir: &Path) -> anyhow::Result<()> {
    restricted_dir(dir, 0o711)
}

fn restricted_dir(dir: &Path, most: u32) -> anyhow::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .with_context(|| format!("cannot create {}", dir.display()))?;
    let found = std::fs::metadata(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let own = rustix::process::geteuid().as_raw();
    if found.uid() != own && found.uid() != 0 {
        bail!(
            "{} belongs to another user (uid {})",
            dir.display(),
            found.uid()
        );
    }
    let mode = found.mode() & 0o7777;
    if mode & OTHERS_WRITE != 0 {
        bail!(
            "other users may write to {} (mode {mode:o}): look for changed files, then run chmod 700 {}",
            dir.display(),
            dir.display()
        );
    }
    // Only where needed: the directory may belong to root.
    if mode & 0o777 & !most != 0 {
        std::fs::set_permissions(dir, Permissions::from_mode(mode & most))
            .with_context(|| format!("cannot protect {}", dir.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(dir: &Path) -> u32 {
        std::fs::metadata(dir).unwrap().mode() & 0o777
    }

    #[test]
    fn others_lose_their_rights_and_a_directory_that_they_can_write_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a/b");
        private_dir(&dir).unwrap();
        assert_eq!(mode(&dir), 0o700);
        std::fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
        passage_dir(&dir).unwrap();
        assert_eq!(mode(&dir), 0o711);
        private_dir(&dir).unwrap();
        assert_eq!(mode(&dir), 0o700);
        for open in [0o770, 0o707, 0o777, 0o1777] {
            std::fs::set_permissions(&dir, Permissions::from_mode(open)).unwrap();
            let error = private_dir(&dir).unwrap_err().to_string();
            assert!(error.contains("chmod 700"), "{error}");
        }
    }
}
