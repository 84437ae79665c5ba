//! The role `machine`: a guest that hosts sandboxes itself.
//!
//! A machine has a secret for its agent, which listens on TCP, a data disk, and the kernel modules of a host.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::Command;

use rustix::mount::MountFlags;

use super::{mounts, say};
use crate::process::Reaper;

/// Where the secret of a machine lies in the initramfs.
const TOKEN_FILES: [&str; 2] = ["/forkd-token", "/etc/forkd/token"];
/// Modules that a host of sandboxes uses where they exist.
const FOR_MACHINE: [&str; 11] = [
    "kvm_amd",
    "kvm_intel",
    "tun",
    "tap",
    "veth",
    "bridge",
    "nf_tables",
    "nft_chain_nat",
    "nft_ct",
    "vhost_vsock",
    "vhost_net",
];

const DEVICE: &str = "/dev/vdb";
const TARGET: &str = "/var/lib/forkd";

/// Mounts the data disk, after making a file system on one that is blank.
async fn attach_data_disk(reaper: &Reaper) {
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

/// The first 64 KiB, which hold the superblock of every common file system, are zero. A disk in use never is.
fn is_blank() -> bool {
    let mut start = vec![0xff; 64 * 1024];
    let read = File::open(DEVICE).and_then(|mut disk| disk.read_exact(&mut start));
    read.is_ok() && start.iter().all(|byte| *byte == 0)
}

/// Brings up the parts of a machine that need programs of its image.
pub async fn finish(reaper: &Reaper) {
    attach_data_disk(reaper).await;
    load_modules(reaper).await;
}

/// The secret of the machine's agent; `None` in a sandbox.
pub fn read_token() -> Option<String> {
    let text = TOKEN_FILES
        .iter()
        .find_map(|path| std::fs::read_to_string(path).ok())?;
    let token = text.trim().to_owned();
    (!token.is_empty()).then_some(token)
}

/// Loads what the machine's own image has and the initramfs had not. Each by itself: one that is missing
/// must not keep the others out.
async fn load_modules(reaper: &Reaper) {
    for module in FOR_MACHINE {
        let other_maker = module.starts_with("kvm_") && Path::new("/dev/kvm").exists();
        if other_maker || Path::new("/sys/module").join(module).exists() {
            continue;
        }
        let mut command = Command::new("/sbin/modprobe");
        command.arg("-q").arg(module);
        if let Ok(child) = reaper.spawn(&mut command) {
            let _ = child.ended.await;
        }
    }
}
