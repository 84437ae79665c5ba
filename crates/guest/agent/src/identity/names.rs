//! Host name, machine id, boot id.
//!
//! A guest binds files in memory over `/etc/hostname` and `/etc/machine-id` when it boots ([`keep_in_memory`]), so that a
//! child that gets its names writes nothing to its disk. Where that failed, the files of the image are written.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use forkd_guest_proto::AgentError;

use crate::agent::run_directory;
use crate::{error, files, sys};

const HOSTNAME: &str = "/etc/hostname";
const MACHINE_ID: &str = "/etc/machine-id";
const DBUS_ID: &str = "/var/lib/dbus/machine-id";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Letters, digits, hyphens and dots, as names on a network are made.
pub fn is_hostname(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
    (1..=63).contains(&name.len()) && name.bytes().all(allowed) && !name.starts_with(['-', '.'])
}

/// Sets the host name, in the image as well where it is kept there.
pub fn set_hostname(name: &str) -> Result<(), AgentError> {
    sys::set_hostname(name).map_err(|error| error::io("cannot set the host name", &error))?;
    if Path::new(HOSTNAME).exists() {
        write_in_place(HOSTNAME, &format!("{name}\n"))?;
    }
    Ok(())
}

/// Binds files in memory over the names that every child changes. A name that the image does not have is left out, but
/// for the machine ID, which every child gets.
pub fn keep_in_memory() -> io::Result<()> {
    if !Path::new(MACHINE_ID).exists() {
        File::create(MACHINE_ID)?;
    }
    for (path, name) in [(HOSTNAME, "hostname"), (MACHINE_ID, "machine-id")] {
        // A symbolic link leads to a file that belongs to another program.
        if !fs::symlink_metadata(path).is_ok_and(|found| found.is_file()) {
            continue;
        }
        let directory = run_directory();
        fs::create_dir_all(&directory)?;
        let copy = directory.join(name);
        fs::copy(path, &copy)?;
        rustix::mount::mount_bind(&copy, path)?;
    }
    Ok(())
}

/// Sets the machine ID if a new one is given, and returns the ID in force. A guest that is rolled back gets no new
/// one: it stays the machine it is.
pub fn set_machine_id(given: Option<&str>) -> Result<String, AgentError> {
    machine_id_in(Path::new(MACHINE_ID), Path::new(DBUS_ID), given)
}

fn machine_id_in(file: &Path, dbus: &Path, given: Option<&str>) -> Result<String, AgentError> {
    let Some(id) = given.map(str::to_ascii_lowercase) else {
        let text = fs::read_to_string(file).unwrap_or_default();
        return Ok(text.trim().to_owned());
    };
    let text = format!("{id}\n");
    let written = if is_bound(file, &run_directory()) {
        overwrite(file, text.as_bytes())
    } else {
        files::replace(file, text.as_bytes())
    };
    written.map_err(|error| error::io(format_args!("cannot write {}", file.display()), &error))?;
    // A symbolic link to the first file has changed with it.
    if fs::symlink_metadata(dbus).is_ok_and(|found| found.is_file()) {
        write_in_place(&dbus.to_string_lossy(), &text)?;
    }
    Ok(id)
}

/// The file is one of the agent's own directory: it cannot be replaced, since a file is bound over its name.
fn is_bound(file: &Path, own: &Path) -> bool {
    let device = |path: &Path| fs::metadata(path).map(|found| found.dev());
    match (device(file), device(own)) {
        (Ok(file), Ok(own)) => file == own,
        _ => false,
    }
}

/// Writes in one step and does not cut the file off before, so that no reader finds it empty.
fn overwrite(file: &Path, bytes: &[u8]) -> io::Result<()> {
    let open = File::options().write(true).open(file)?;
    open.write_all_at(bytes, 0)?;
    open.set_len(bytes.len() as u64)
}

/// Gives the boot a new id, unless `keep`. The kernel's own cannot be changed, so another file is put over it.
pub fn boot_id(keep: bool) -> Result<String, AgentError> {
    let path = run_directory().join("boot_id");
    let mounted = fs::metadata(&path).is_ok() && is_mounted();
    if keep && mounted {
        let id = fs::read_to_string(&path);
        let id = id.map_err(|error| error::at("read", &path, &error))?;
        return Ok(id.trim_end().to_owned());
    }
    let id = uuid(random()?);
    // In place: what lies over the kernel's file is this very file.
    write_in_place(&path.to_string_lossy(), &format!("{id}\n"))?;
    if !mounted {
        rustix::mount::mount_bind(&path, BOOT_ID)
            .map_err(|errno| error::io("cannot change the boot id", &errno.into()))?;
    }
    Ok(id)
}

fn is_mounted() -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    mounts
        .lines()
        .any(|line| line.split_ascii_whitespace().nth(1) == Some(BOOT_ID))
}

fn write_in_place(path: &str, text: &str) -> Result<(), AgentError> {
    fs::write(path, text).map_err(|error| error::io(format_args!("cannot write {path}"), &error))
}

fn random() -> Result<[u8; 16], AgentError> {
    let mut bytes = [0; 16];
    let flags = rustix::rand::GetRandomFlags::NONBLOCK;
    match rustix::rand::getrandom(&mut bytes, flags) {
        Ok(count) if count == bytes.len() => Ok(bytes),
        Ok(_) => Err(error::bad("the kernel gave too few random bytes")),
        Err(errno) => Err(error::io("cannot draw random bytes", &errno.into())),
    }
}

/// A version 4 UUID of these bytes.
fn uuid(mut bytes: [u8; 16]) -> String {
    let [_, _, _, _, _, _, version, _, variant, ..] = &mut bytes;
    *version = (*version & 0x0f) | 0x40;
    *variant = (*variant & 0x3f) | 0x80;
    let digits = hex::encode(bytes);
    let parts = [(0, 8), (8, 12), (12, 16), (16, 20), (20, 32)];
    let parts = parts.iter().filter_map(|(from, to)| digits.get(*from..*to));
    parts.collect::<Vec<_>>().join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        for good in ["a", "child-1", "a.b.c", "X9"] {
            assert!(is_hostname(good), "{good}");
        }
        for bad in ["", "-a", ".a", "a b", "a/b", "ä", &"x".repeat(64)] {
            assert!(!is_hostname(bad), "{bad}");
        }
    }

    #[test]
    fn a_machine_id_changes_only_when_one_is_given() {
        let directory = tempfile::tempdir().unwrap();
        let (file, dbus) = (directory.path().join("id"), directory.path().join("dbus"));
        fs::write(&dbus, "old\n").unwrap();
        let first = "AB".repeat(16);
        let set = machine_id_in(&file, &dbus, Some(&first)).unwrap();
        assert_eq!(set, "ab".repeat(16));
        let kept = machine_id_in(&file, &dbus, None).unwrap();
        assert_eq!(kept, set);
        for path in [&file, &dbus] {
            assert_eq!(fs::read_to_string(path).unwrap(), format!("{set}\n"));
        }
    }

    #[test]
    fn a_file_that_is_overwritten_is_the_same_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("id");
        fs::write(&file, "a longer text\n").unwrap();
        let before = fs::metadata(&file).unwrap().ino();
        overwrite(&file, b"short\n").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"short\n");
        assert_eq!(fs::metadata(&file).unwrap().ino(), before);
        assert!(is_bound(&file, directory.path()));
        assert!(!is_bound(Path::new("/proc/self/stat"), directory.path()));
        assert!(!is_bound(
            &directory.path().join("missing"),
            directory.path()
        ));
    }

    #[test]
    fn a_boot_id_is_a_random_uuid() {
        assert_eq!(uuid([0xff; 16]), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        assert_ne!(uuid(random().unwrap()), uuid(random().unwrap()));
    }
}
