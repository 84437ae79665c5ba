//! Copies finished content out of the cache.
//!
//! A target file is replaced atomically. Holes of sparse files stay holes.

use std::fs::File;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Why content could not be copied out of the cache.
#[derive(Debug, Error)]
#[error("cannot copy {} to {}", from.display(), to.display())]
pub struct ExportError {
    from: PathBuf,
    to: PathBuf,
    #[source]
    source: io::Error,
}

/// Copies a file, or a folder with its content, over the target. Files are replaced atomically; holes stay
/// holes.
pub fn copy(from: &Path, to: &Path) -> Result<(), ExportError> {
    copy_any(from, to).map_err(|source| ExportError {
        from: from.to_owned(),
        to: to.to_owned(),
        source,
    })
}

fn copy_any(from: &Path, to: &Path) -> io::Result<()> {
    if !from.is_dir() {
        return copy_file(from, to);
    }
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        copy_any(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

fn copy_file(from: &Path, to: &Path) -> io::Result<()> {
    let folder = match to.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    std::fs::create_dir_all(folder)?;
    let source = File::open(from)?;
    let target = tempfile::NamedTempFile::new_in(folder)?;
    forkd_os::sparse::copy(&source, target.as_file())?;
    target
        .as_file()
        .set_permissions(std::fs::Permissions::from_mode(0o644))?;
    target.persist(to).map_err(|error| error.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    #[test]
    fn holes_stay_holes_and_the_content_is_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("a"), folder.path().join("b/c"));
        let file = File::create(&from).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(b"start", 0).unwrap();
        file.write_all_at(b"middle", 20 << 20).unwrap();
        copy(&from, &to).unwrap();
        assert!(std::fs::read(&from).unwrap() == std::fs::read(&to).unwrap());
        assert!(std::fs::metadata(&to).unwrap().blocks() * 512 < 4 << 20);
    }

    #[test]
    fn folders_are_copied_and_the_target_is_named_when_it_fails() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("a/b")).unwrap();
        std::fs::write(folder.path().join("a/b/file"), "x").unwrap();
        copy(&folder.path().join("a"), &folder.path().join("copy")).unwrap();
        assert_eq!(
            std::fs::read(folder.path().join("copy/b/file")).unwrap(),
            b"x"
        );
        let error = copy(&folder.path().join("gone"), Path::new("/dev/null/x")).unwrap_err();
        assert!(error.to_string().contains("/dev/null/x"), "{error}");
    }
}
