//! The manifest of the store as the configuration of an artifact, and back.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use forkd_hub::compat::Host;
use forkd_hub::config::{self, Blob, Config};
use forkd_hub::manifest::Role;
use forkd_store::{
    BlobRef, Cpu, DiskManifest, Manifest, MemoryManifest, Origin, SCHEMA, Source, Versions,
};
use forkd_types::{Engine, Tag};
use forkd_vmm_proto::{STATE_FORMAT, STATE_MAGIC};

use crate::clock;

/// This host, as artifacts see it.
pub fn host() -> Host {
    Host::here(Engine::FORKD.as_str(), STATE_FORMAT)
}

/// Every blob of a snapshot, each once, in the order in which they are packed.
pub fn blobs(manifest: &Manifest) -> Vec<(BlobRef, Role)> {
    let disks = manifest.disks.iter();
    let disks = disks.flat_map(|disk| std::iter::once(&disk.base).chain(&disk.layers));
    let memory = manifest.memory.layers.iter().chain(&manifest.memory.index);
    let memory = memory.chain([&manifest.state]);
    let all = disks
        .map(|blob| (*blob, Role::Disk))
        .chain(memory.map(|blob| (*blob, Role::Memory)));
    let mut unique: Vec<(BlobRef, Role)> = Vec::new();
    for (blob, role) in all {
        if !unique.iter().any(|(found, _)| found.digest == blob.digest) {
            unique.push((blob, role));
        }
    }
    unique
}

/// Describes a snapshot without paths, tags and labels of this host.
pub fn config(manifest: &Manifest, state: &File, host: &Host) -> Config {
    let all = blobs(manifest);
    let number = |blob: &BlobRef| {
        let found = all
            .iter()
            .position(|(found, _)| found.digest == blob.digest);
        found.unwrap_or(usize::MAX)
    };
    Config {
        schema: config::SCHEMA,
        name: manifest.tag.to_string(),
        description: None,
        created_at_unix: manifest.created_at_unix,
        engine: manifest.engine.to_string(),
        state_format: state_format(state),
        memory_mib: manifest.memory_mib,
        vcpus: manifest.vcpus,
        cpu: host.cpu(manifest.cpu == Cpu::Baseline),
        blobs: all
            .iter()
            .map(|(blob, _)| Blob {
                digest: blob.digest,
                bytes: blob.bytes,
            })
            .collect(),
        state: number(&manifest.state),
        memory: config::Memory {
            layers: manifest.memory.layers.iter().map(number).collect(),
            index: manifest.memory.index.as_ref().map(number),
        },
        disks: manifest
            .disks
            .iter()
            .map(|disk| config::Disk {
                base: number(&disk.base),
                layers: disk.layers.iter().map(number).collect(),
                read_only: disk.read_only,
                serial: disk.serial.clone(),
            })
            .collect(),
        source: config::Source {
            image: file_name(&manifest.source.image),
            kernel: file_name(&manifest.source.kernel),
            kernel_digest: manifest.source.kernel_digest,
            initramfs_digest: manifest.source.initramfs_digest,
            cmdline: manifest.source.cmdline.clone(),
        },
        booted: matches!(
            manifest.origin,
            Origin::Boot { .. } | Origin::Import { booted: true, .. }
        ),
        versions: config::Versions {
            forkd: manifest.versions.forkd.clone(),
            vmm: manifest.versions.vmm.clone(),
            agent: manifest.versions.agent.clone(),
            numpy: manifest.versions.numpy.clone(),
        },
        spare_disks: manifest.spare_disks,
    }
}

/// The last part of a path: folders are those of this host.
fn file_name(text: &str) -> String {
    text.rsplit('/').next().unwrap_or(text).to_owned()
}

fn state_format(state: &File) -> Option<u32> {
    let (mut magic, mut version) = ([0; 8], [0; 4]);
    state.read_exact_at(&mut magic, 0).ok()?;
    state.read_exact_at(&mut version, 8).ok()?;
    (magic == *STATE_MAGIC).then(|| u32::from_le_bytes(version))
}

/// The manifest of a snapshot that an artifact becomes. None if a number in the configuration leads nowhere.
pub fn manifest(
    tag: Tag,
    config: &Config,
    artifact: String,
    signer: Option<String>,
) -> Option<Manifest> {
    let blob = |number: &usize| {
        config.blobs.get(*number).map(|blob| BlobRef {
            digest: blob.digest,
            bytes: blob.bytes,
        })
    };
    let all = |numbers: &[usize]| numbers.iter().map(blob).collect::<Option<Vec<_>>>();
    let disk = |disk: &config::Disk| {
        Some(DiskManifest {
            base: blob(&disk.base)?,
            layers: all(&disk.layers)?,
            read_only: disk.read_only,
            serial: disk.serial.clone(),
        })
    };
    Some(Manifest {
        schema: SCHEMA,
        tag,
        created_at_unix: clock::unix(),
        engine: config.engine.parse().ok()?,
        memory_mib: config.memory_mib,
        vcpus: config.vcpus,
        cpu: if config.cpu.model == "baseline" {
            Cpu::Baseline
        } else {
            Cpu::Host
        },
        state: blob(&config.state)?,
        memory: MemoryManifest {
            layers: all(&config.memory.layers)?,
            index: match &config.memory.index {
                Some(number) => Some(blob(number)?),
                None => None,
            },
        },
        disks: config.disks.iter().map(disk).collect::<Option<_>>()?,
        source: Source {
            image: config.source.image.clone(),
            kernel: config.source.kernel.clone(),
            kernel_digest: config.source.kernel_digest,
            initramfs_digest: config.source.initramfs_digest,
            cmdline: config.source.cmdline.clone(),
        },
        parent: None,
        origin: Origin::Import {
            artifact,
            signer,
            booted: config.booted,
        },
        versions: Versions {
            forkd: config.versions.forkd.clone(),
            vmm: config.versions.vmm.clone(),
            agent: config.versions.agent.clone(),
            numpy: config.versions.numpy.clone(),
        },
        labels: BTreeMap::new(),
        spare_disks: config.spare_disks,
        volumes: Vec::new(),
    })
}
