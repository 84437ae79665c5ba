//! The manifest: the blobs and properties of a tag, as JSON on disk.

use std::collections::BTreeMap;

use forkd_types::{Digest, Engine, Tag};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The version of the manifest. Version 3 added `spare_disks` and `volumes`.
pub const SCHEMA: u32 = 3;
/// The oldest version that is read.
const OLDEST: u32 = 2;
/// The longest chain of parents.
pub const MAX_CHAIN: usize = 64;
/// The largest manifest that is read.
pub(crate) const MAX_BYTES: u64 = 1 << 20;
/// The most blobs of one kind in a manifest.
const MAX_LAYERS: usize = 64;

/// Why a manifest cannot be used.
#[derive(Debug, Error)]
pub enum ManifestError {
    /// The manifest is missing or unreadable.
    #[error("it cannot be read")]
    Read(#[source] std::io::Error),
    /// The manifest is too large.
    #[error("it has {bytes} bytes, {MAX_BYTES} is the limit")]
    TooLarge { bytes: u64 },
    /// The manifest is not valid JSON of this form.
    #[error("it does not parse")]
    Parse(#[source] serde_json::Error),
    /// Another version of the manifest.
    #[error("it has schema {found}, this program reads {OLDEST} to {SCHEMA}")]
    Schema { found: u32 },
    /// The manifest names another tag than its directory.
    #[error("it is the manifest of {found}")]
    OtherTag { found: Tag },
    /// A number or list is out of range.
    #[error("{what} is out of range")]
    OutOfRange { what: &'static str },
}

/// A frozen machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The version: [`SCHEMA`], or an earlier one in the manifest of an earlier program.
    pub schema: u32,
    pub tag: Tag,
    /// When it was made.
    pub created_at_unix: u64,
    /// The engine that wrote the state and alone can read it.
    pub engine: Engine,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Which CPU the guest saw.
    pub cpu: Cpu,
    /// vCPU and device state.
    pub state: BlobRef,
    pub memory: MemoryManifest,
    /// Disks in slot order.
    pub disks: Vec<DiskManifest>,
    /// Origin of the first tag of the chain.
    pub source: Source,
    /// The tag that this one builds on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Parent>,
    /// The operation that made the tag.
    pub origin: Origin,
    /// Versions of the programs that wrote the tag.
    pub versions: Versions,
    /// Labels of the user.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Empty disk slots behind the disks, which volumes are attached to.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub spare_disks: u8,
    /// Disks that are clones of volumes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeClone>,
}

fn is_zero(count: &u8) -> bool {
    *count == 0
}

/// A disk that is a clone of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeClone {
    pub name: Tag,
    /// Where the guest has it mounted.
    pub path: String,
    /// Number of the disk.
    pub slot: usize,
    /// ID of the volume that was cloned.
    pub volume: u64,
    /// The generation of the volume that was cloned.
    pub generation: u64,
}

/// CPU model that the guest sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cpu {
    /// All features of the host.
    Host,
    /// The x86-64-v2 baseline.
    Baseline,
}

/// A file by its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlobRef {
    /// [`crate::page_digest`] of the content.
    pub digest: Digest,
    /// Length in bytes.
    pub bytes: u64,
}

/// Guest memory as layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryManifest {
    /// The files that hold pages, the oldest first.
    pub layers: Vec<BlobRef>,
    /// The page map over the layers; absent if one layer holds all pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<BlobRef>,
}

/// A disk of the VM and its layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskManifest {
    /// The image at the bottom.
    pub base: BlobRef,
    /// Thin layers over it, the oldest first; all frozen.
    pub layers: Vec<BlobRef>,
    /// The guest may not write.
    pub read_only: bool,
    /// Serial number that the guest sees.
    pub serial: String,
}

/// Origin of a booted machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// The image's name, or the path that was given.
    pub image: String,
    /// The kernel's path or name, for people.
    pub kernel: String,
    /// Digest of the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_digest: Option<Digest>,
    /// Digest of the initial RAM disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initramfs_digest: Option<Digest>,
    /// The kernel command line.
    pub cmdline: String,
}

/// The tag that a snapshot builds on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parent {
    /// Name at the time of the cut.
    pub tag: Tag,
    /// Digest of its manifest.
    pub digest: Digest,
}

/// The operation that made a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Origin {
    /// A parent was booted and frozen.
    Boot {
        /// From the start of the VM to ready.
        ready_us: u64,
    },
    /// A running sandbox was cut.
    Branch {
        /// ID of the sandbox.
        sandbox: String,
        /// Pause of the sandbox.
        pause_us: u64,
        /// From the command to everything written.
        total_us: u64,
        /// Pages that were written.
        pages: u64,
    },
    /// Another snapshot was flattened.
    Compact { from: Tag },
    /// It was unpacked from an artifact.
    Import {
        /// Digest of the artifact's manifest.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        artifact: String,
        /// Who signed the artifact, if that was checked.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        signer: Option<String>,
        /// The parent was booted from the base of its disks.
        #[serde(default)]
        booted: bool,
    },
}

/// Versions of the programs that wrote a snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Versions {
    /// Version of the daemon.
    pub forkd: String,
    /// Version of the VMM.
    pub vmm: String,
    /// The agent in the guest.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub agent: String,
    /// NumPy in the warm interpreter; empty if it is not loaded.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub numpy: String,
}

impl Manifest {
    /// Parses and checks what was read from the directory of `tag`.
    pub fn parse(tag: &Tag, bytes: &[u8]) -> Result<Self, ManifestError> {
        #[derive(Deserialize)]
        struct Probe {
            schema: u32,
        }
        let probe: Probe = serde_json::from_slice(bytes).map_err(ManifestError::Parse)?;
        if !(OLDEST..=SCHEMA).contains(&probe.schema) {
            return Err(ManifestError::Schema {
                found: probe.schema,
            });
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(ManifestError::Parse)?;
        if manifest.tag != *tag {
            return Err(ManifestError::OtherTag {
                found: manifest.tag,
            });
        }
        manifest.check()?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), ManifestError> {
        let range = |good: bool, what| good.then_some(()).ok_or(ManifestError::OutOfRange { what });
        let memory = u64::from(self.memory_mib) << 20;
        range(
            self.schema >= SCHEMA || self.spare_disks == 0 && self.volumes.is_empty(),
            "schema",
        )?;
        range((1..=1 << 20).contains(&self.memory_mib), "memory_mib")?;
        range((1..=32).contains(&self.vcpus), "vcpus")?;
        range(
            (1..=MAX_LAYERS).contains(&self.memory.layers.len()),
            "memory.layers",
        )?;
        range(
            self.memory.index.is_some() || self.memory.layers.len() == 1,
            "memory.index",
        )?;
        range(
            self.memory.index.is_some() || self.memory.layers.iter().all(|l| l.bytes == memory),
            "memory.layers.bytes",
        )?;
        range(
            self.disks.len() + usize::from(self.spare_disks) <= 4,
            "disks",
        )?;
        range(
            self.volumes.iter().all(|v| v.slot < self.disks.len()),
            "volumes.slot",
        )?;
        range(
            self.disks
                .iter()
                .all(|disk| disk.layers.len() <= MAX_LAYERS),
            "disks.layers",
        )?;
        range(
            self.disks.iter().all(|disk| disk.serial.len() <= 20),
            "disks.serial",
        )
    }

    /// The manifest as stored.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }

    /// Digest by which children name their parent.
    pub fn digest(&self) -> Digest {
        Digest(*blake3::hash(&self.to_bytes()).as_bytes())
    }

    /// Digest of every blob, each once.
    pub fn digests(&self) -> impl Iterator<Item = Digest> + use<> {
        self.blobs().into_iter().map(|blob| blob.digest)
    }

    /// Every blob, each once.
    pub fn blobs(&self) -> Vec<BlobRef> {
        let mut all = vec![self.state];
        all.extend(&self.memory.layers);
        all.extend(self.memory.index);
        for disk in &self.disks {
            all.push(disk.base);
            all.extend(&disk.layers);
        }
        all.sort_by_key(|blob| blob.digest);
        all.dedup_by_key(|blob| blob.digest);
        all
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub fn example(tag: &str) -> Manifest {
        let blob = |n: u8, bytes| BlobRef {
            digest: Digest([n; 32]),
            bytes,
        };
        Manifest {
            schema: SCHEMA,
            tag: tag.parse().unwrap(),
            created_at_unix: 1,
            engine: Engine::FORKD,
            memory_mib: 1,
            vcpus: 1,
            cpu: Cpu::Host,
            state: blob(1, 10),
            memory: MemoryManifest {
                layers: vec![blob(2, 1 << 20)],
                index: None,
            },
            disks: vec![DiskManifest {
                base: blob(3, 8192),
                layers: vec![blob(4, 4096), blob(4, 4096)],
                read_only: false,
                serial: "root".into(),
            }],
            source: Source::default(),
            parent: None,
            origin: Origin::Boot { ready_us: 5 },
            versions: Versions::default(),
            labels: BTreeMap::new(),
            spare_disks: 0,
            volumes: Vec::new(),
        }
    }

    #[test]
    fn stored_and_read_back() {
        let manifest = example("a");
        let read = Manifest::parse(&manifest.tag, &manifest.to_bytes()).unwrap();
        assert_eq!(read, manifest);
        assert_eq!(read.digest(), manifest.digest());
        assert_eq!(manifest.blobs().len(), 4);
    }

    #[test]
    fn an_import_without_details_is_read() {
        let origin: Origin = serde_json::from_str(r#"{"kind":"import"}"#).unwrap();
        let bare = Origin::Import {
            artifact: String::new(),
            signer: None,
            booted: false,
        };
        assert_eq!(origin, bare);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let good = example("a");
        let tag: Tag = "a".parse().unwrap();
        let refused = |change: &dyn Fn(&mut Manifest)| {
            let mut bad = good.clone();
            change(&mut bad);
            assert!(Manifest::parse(&tag, &bad.to_bytes()).is_err(), "{bad:?}");
        };
        refused(&|m| m.schema = OLDEST - 1);
        refused(&|m| (m.schema, m.spare_disks) = (OLDEST, 1));
        refused(&|m| m.spare_disks = 4);
        refused(&|m| m.volumes.push(volume(1)));
        refused(&|m| m.schema = SCHEMA + 1);
        refused(&|m| m.tag = "b".parse().unwrap());
        refused(&|m| m.vcpus = 0);
        refused(&|m| m.memory_mib = 2);
        refused(&|m| m.memory.layers.clear());
        refused(&|m| m.memory.layers.push(m.memory.layers[0]));
        refused(&|m| m.disks[0].serial = "x".repeat(21));
    }

    fn volume(slot: usize) -> VolumeClone {
        VolumeClone {
            name: "data".parse().unwrap(),
            path: "/data".into(),
            slot,
            volume: 7,
            generation: 1,
        }
    }

    #[test]
    fn a_manifest_of_the_version_before_is_read_as_it_is() {
        let tag: Tag = "a".parse().unwrap();
        let old = Manifest {
            schema: OLDEST,
            ..example("a")
        };
        let read = Manifest::parse(&tag, &old.to_bytes()).unwrap();
        assert_eq!((read.digest(), read.spare_disks), (old.digest(), 0));
        let new = Manifest {
            spare_disks: 3,
            volumes: vec![volume(0)],
            ..example("a")
        };
        assert_eq!(Manifest::parse(&tag, &new.to_bytes()).unwrap(), new);
    }

    proptest! {
        #[test]
        fn a_changed_byte_never_panics(at in 0usize..900, byte: u8) {
            let mut bytes = example("a").to_bytes();
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = Manifest::parse(&"a".parse().unwrap(), &bytes);
        }
    }
}
