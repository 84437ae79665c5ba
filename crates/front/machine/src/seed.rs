//! The token of a machine, and its way into the machine.
//!
//! The token is appended to the initramfs as a file. On QEMU's command line every user of the host could read
//! it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::error::{MachineError, file};
use crate::record::write_private;

/// Path of the token in the initramfs.
const TOKEN_PATH: &str = "forkd-token";

/// Returns 256 random bits as text.
pub fn new_token() -> String {
    hex::encode(rand::random::<[u8; 32]>())
}

/// Stores the token for later commands.
pub fn write_token(path: &Path, token: &str) -> Result<(), MachineError> {
    write_private(path, token.as_bytes())
}

pub fn read_token(path: &Path) -> Result<String, MachineError> {
    fs::read_to_string(path).map_err(file("read", path))
}

/// Writes the image's initramfs with the token appended. Only the owner can read the file.
pub fn write_initrd(initramfs: &Path, token: &str, out: &Path) -> Result<(), MachineError> {
    let mut source = File::open(initramfs).map_err(file("open", initramfs))?;
    let mut add = || -> io::Result<()> {
        let mut target = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(out)?;
        let length = io::copy(&mut source, &mut target)?;
        // The kernel looks for the next archive at a multiple of four.
        target.write_all(&vec![0; padding(length)])?;
        target.write_all(&archive(TOKEN_PATH, token.as_bytes()))
    };
    add().map_err(file("write", out))
}

/// A cpio archive in the `newc` format with one file of mode 0400.
fn archive(name: &str, content: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    entry(&mut out, name, 0o100_400, content);
    entry(&mut out, "TRAILER!!!", 0, &[]);
    out
}

fn entry(out: &mut Vec<u8>, name: &str, mode: u32, content: &[u8]) {
    let name_size = name.len() + 1;
    // inode, mode, uid, gid, links, mtime, size, dev major, minor, rdev major, minor, name size, sum
    let fields = [
        0,
        mode,
        0,
        0,
        1,
        0,
        content.len() as u32,
        0,
        0,
        0,
        0,
        name_size as u32,
        0,
    ];
    out.extend_from_slice(b"070701");
    for field in fields {
        out.extend_from_slice(format!("{field:08X}").as_bytes());
    }
    out.extend_from_slice(name.as_bytes());
    out.push(0);
    out.resize(out.len() + padding(out.len() as u64), 0);
    out.extend_from_slice(content);
    out.resize(out.len() + padding(out.len() as u64), 0);
}

fn padding(length: u64) -> usize {
    (length.wrapping_neg() % 4) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Command, Stdio};

    #[test]
    fn every_secret_is_new_and_long() {
        let (one, two) = (new_token(), new_token());
        assert_ne!(one, two);
        assert_eq!(one.len(), 64);
    }

    #[test]
    fn cpio_reads_the_added_archive() {
        let dir = tempfile::tempdir().unwrap();
        let mut cpio = Command::new("cpio")
            .args(["-i", "--quiet"])
            .current_dir(dir.path())
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        cpio.stdin
            .take()
            .unwrap()
            .write_all(&archive("secret", b"12345"))
            .unwrap();
        assert!(cpio.wait().unwrap().success());
        let secret = dir.path().join("secret");
        assert_eq!(fs::read(&secret).unwrap(), b"12345");
        assert_eq!(
            fs::metadata(&secret).unwrap().permissions().mode() & 0o777,
            0o400
        );
    }

    #[test]
    fn the_archive_begins_at_a_multiple_of_four_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("a"), dir.path().join("b"));
        fs::write(&from, b"12345").unwrap();
        write_initrd(&from, "t", &to).unwrap();
        let bytes = fs::read(&to).unwrap();
        assert_eq!(&bytes[..5], b"12345");
        assert_eq!(&bytes[8..14], b"070701");
        assert_eq!(
            fs::metadata(&to).unwrap().permissions().mode() & 0o777,
            0o600
        );
    }
}
