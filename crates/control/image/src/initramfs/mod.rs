//! The initramfs: the kernel modules that lead to the root disk, and the agent.
//!
//! The archive is uncompressed, because the host has it in its page cache. Modules are listed in load order
//! in `/lib/modules/load-order`; the agent is `/init`.

pub mod cpio;

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::cache::{Cache, CacheError, Key, Kind};
use crate::digest;
use crate::kernel::modules::{LoadedModule, ModulesError};
use crate::kernel::{Kernel, KernelError};
use crate::progress::Progress;
use cpio::CpioWriter;

/// Part of every key. Raised when the layout of the archive changes.
const LAYOUT: &[u8] = b"initramfs 1";
/// File name in the cache.
const FILE: &str = "initramfs.cpio";

/// The kind of VM that an initramfs is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// A microVM: virtio-mmio devices.
    Guest,
    /// The machine under QEMU: virtio-pci devices, which the kernel has built in.
    Machine,
}

impl Flavour {
    pub fn name(self) -> &'static str {
        match self {
            Self::Guest => "guest",
            Self::Machine => "machine",
        }
    }

    /// The required modules, in load order.
    pub fn modules(self) -> &'static [&'static str] {
        match self {
            Self::Guest => &[
                "virtio_mmio",
                "virtio_blk",
                "ext4",
                "overlay",
                "vmw_vsock_virtio_transport",
                "virtio_net",
                "virtio_rng",
                "virtio_balloon",
                "pvpanic_mmio",
                "button",
                "evdev",
            ],
            // From here they are loaded in a tenth of the time that the compressed ones of the root
            // take under emulation.
            Self::Machine => &[
                "virtio_pci",
                "virtio_blk",
                "ext4",
                "overlay",
                "virtio_net",
                "virtio_rng",
                "virtio_balloon",
                "kvm_amd",
                "kvm_intel",
                "tun",
                "tap",
                "veth",
                "bridge",
                "nf_tables",
                "nft_chain_nat",
                "nft_nat",
                "nft_ct",
                "vhost_vsock",
                "vhost_net",
            ],
        }
    }
}

/// Why an initramfs could not be built.
#[derive(Debug, Error)]
pub enum InitramfsError {
    #[error("the agent {} cannot be read", path.display())]
    Agent {
        /// The expected path.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the agent {} is not a static x86_64 program", path.display())]
    NotStatic { path: PathBuf },
    #[error("cannot write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the modules for the initramfs are not complete")]
    Modules(#[from] ModulesError),
    #[error("the kernel cannot be used")]
    Kernel(#[from] KernelError),
    #[error("the cache cannot be used")]
    Cache(#[from] CacheError),
}

/// Assembles the initramfs for a kernel and an agent. Later calls with the same content return the cached
/// file.
pub fn build(
    cache: &Cache,
    kernel: &Kernel,
    agent: &Path,
    flavour: Flavour,
    progress: &Progress,
) -> Result<PathBuf, InitramfsError> {
    let program = std::fs::read(agent).map_err(|source| InitramfsError::Agent {
        path: agent.to_owned(),
        source,
    })?;
    if !crate::kernel::elf::is_static_program(&program) {
        return Err(InitramfsError::NotStatic {
            path: agent.to_owned(),
        });
    }
    let modules = kernel.modules()?.closure(flavour.modules())?;
    let archive = assemble(&modules, &program).map_err(|source| InitramfsError::Write {
        path: FILE.into(),
        source,
    })?;
    let digest = digest::of_bytes(&archive);
    let readable = format!("{}-{}", flavour.name(), kernel.record.version);
    let key = Key::new(&readable, &[LAYOUT, &digest.0]);
    let folder = cache.content(Kind::Initramfs, &key, progress, |staging| {
        let path = staging.join(FILE);
        std::fs::write(&path, &archive).map_err(|source| InitramfsError::Write { path, source })
    })?;
    Ok(folder.join(FILE))
}

/// Builds the archive: mount points, the modules in load order, and the agent as `/init`.
fn assemble(modules: &[LoadedModule], agent: &[u8]) -> io::Result<Vec<u8>> {
    let mut writer = CpioWriter::new(Vec::new());
    let folders: BTreeSet<&str> = [
        "dev",
        "lib",
        "lib/modules",
        "newroot",
        "proc",
        "run",
        "sys",
        "tmp",
    ]
    .into();
    for folder in folders {
        writer.directory(folder, 0o755)?;
    }
    // The kernel opens it for the first process before anything is mounted.
    writer.character_device("dev/console", 0o600, (5, 1))?;
    writer.file("init", 0o755, agent)?;
    let mut order = String::new();
    for module in modules {
        order.push_str(&format!("/lib/modules/{}.ko\n", module.name));
    }
    writer.file("lib/modules/load-order", 0o644, order.as_bytes())?;
    for module in modules {
        writer.file(
            &format!("lib/modules/{}.ko", module.name),
            0o644,
            &module.content,
        )?;
    }
    writer.finish()
}

#[cfg(test)]
mod tests {
    use super::cpio::reader::read;
    use super::*;

    #[test]
    fn the_archive_has_what_the_agent_expects() {
        let modules = ["failover", "virtio_net"].map(|name| LoadedModule {
            name: name.into(),
            content: name.as_bytes().to_vec(),
        });
        let archive = assemble(&modules, b"agent").unwrap();
        let entries = read(&archive);
        let content = |path: &str| {
            let entry = entries.iter().find(|entry| entry.path == path).unwrap();
            entry.content.clone()
        };
        assert_eq!(content("init"), b"agent");
        assert_eq!(
            content("lib/modules/load-order"),
            b"/lib/modules/failover.ko\n/lib/modules/virtio_net.ko\n"
        );
        assert_eq!(content("lib/modules/virtio_net.ko"), b"virtio_net");
        for folder in ["dev", "proc", "sys", "newroot", "run"] {
            assert!(entries.iter().any(|entry| entry.path == folder), "{folder}");
        }
        assert_eq!(assemble(&modules, b"agent").unwrap(), archive);
    }
}
