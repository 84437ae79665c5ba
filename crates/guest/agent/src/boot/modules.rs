//! Kernel modules.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use rustix::io::Errno;

use super::say;
use crate::process::Reaper;

const LOAD_ORDER: &str = "/lib/modules/load-order";

/// What a machine that hosts sandboxes wants and can live without.
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

/// Loads the modules of the initramfs, which come in an order that needs no dependency search.
pub fn load() {
    for path in fs::read_to_string(LOAD_ORDER).unwrap_or_default().lines() {
        let path = path.trim();
        if path.is_empty() || path.starts_with('#') {
            continue;
        }
        let loaded = File::open(path)
            .map_err(|error| error.to_string())
            .and_then(|file| match rustix::system::finit_module(&file, c"", 0) {
                // A module for hardware that is not there, such as the other maker's processor.
                Ok(()) | Err(Errno::EXIST | Errno::NODEV | Errno::OPNOTSUPP) => Ok(()),
                Err(errno) => Err(errno.to_string()),
            });
        if let Err(error) = loaded {
            say(format_args!("cannot load {path}: {error}"));
        }
    }
}

/// Loads what the machine's own image has and the initramfs had not. Each by itself: one that is missing
/// must not keep the others out.
pub async fn probe_for_machine(reaper: &Reaper) {
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
