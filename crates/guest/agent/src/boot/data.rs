//! The machine's data disk.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::Command;

use rustix::mount::MountFlags;

use super::{mounts, say};
use crate::process::Reaper;

const DEVICE: &str = "/dev/vdb";
const TARGET: &str = "/var/lib/forkd";

/// Mounts the data disk, after making a file system on one that is blank.
pub async fn attach(reaper: &Reaper) {
    if !Path::new(DEVICE).exists() {
        return;
    }
    if is_blank() {
        let mut command = Command::new("/sbin/mke2fs");
        command.args([
            "-q",
            "-t",
            "ext4",
            "-F",
            "-E",
            "lazy_itable_init=1,lazy_journal_init=1",
            DEVICE,
        ]);
        match reaper.spawn(&mut command) {
            Ok(child) => {
                let _ = child.ended.await;
            }
            Err(error) => say(format_args!("cannot run mke2fs: {error}")),
        }
    }
    if let Err(error) = mounts::place(DEVICE, TARGET, "ext4", MountFlags::NOATIME, None) {
        say(error);
    }
}

/// The place of the superblock holds nothing at all: never a disk that somebody uses.
fn is_blank() -> bool {
    let mut start = vec![0xff; 64 * 1024];
    let read = File::open(DEVICE).and_then(|mut disk| disk.read_exact(&mut start));
    read.is_ok() && start.iter().all(|byte| *byte == 0)
}
