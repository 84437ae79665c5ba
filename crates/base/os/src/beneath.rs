//! Opening a path that must stay below a directory.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};

/// Opens a regular file for reading. The kernel resolves `relative` and refuses `..` above `dir`, every symbolic link
/// and every other file system's magic link.
///
/// The check and the open are one system call: between the two, no other process can exchange a directory for a link.
/// The caller passes the descriptor on, and never opens the path a second time.
pub fn open_file(dir: &Path, relative: &Path) -> io::Result<File> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = openat(CWD, dir, flags, Mode::empty())?;
    // A FIFO would block the open until a writer comes.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let file = File::from(openat2(dir, relative, flags, Mode::empty(), resolve)?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        ));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_regular_files_below_the_directory_are_opened() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("images");
        std::fs::create_dir_all(dir.join("a")).unwrap();
        std::fs::write(dir.join("a/disk"), "content").unwrap();
        std::fs::write(root.path().join("secret"), "key").unwrap();
        symlink("../secret", dir.join("link")).unwrap();
        symlink(root.path(), dir.join("up")).unwrap();

        let mut text = String::new();
        let mut file = open_file(&dir, Path::new("a/disk")).unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "content");
        for refused in ["../secret", "a/../../secret", "link", "up/secret", "a", ""] {
            assert!(open_file(&dir, Path::new(refused)).is_err(), "{refused}");
        }
        let absolute = root.path().join("secret");
        assert!(open_file(&dir, &absolute).is_err());
    }
}
