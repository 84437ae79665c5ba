//! Kernel modules of the initramfs.

use std::fs::{self, File};

use rustix::io::Errno;

use super::say;

const LOAD_ORDER: &str = "/lib/modules/load-order";

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
