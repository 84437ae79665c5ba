//! The configuration of an artifact: the machine, and the blobs that it is made of.
//!
//! It holds no path, no tag and no label of the host that wrote it.

use forkd_types::Digest;
use serde::{Deserialize, Serialize};

use crate::error::HubError;
use crate::index::BlobMap;
use crate::limits;
use crate::manifest::{bounded, parse, to_bytes};

/// The version of the configuration. Version 2 added `spare_disks`.
pub const SCHEMA: u32 = 2;
/// The oldest version that is read.
const OLDEST: u32 = 1;
/// The most disks of a machine, those in empty slots included.
const MAX_DISKS: usize = 4;

/// A frozen machine in portable form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// The version: [`SCHEMA`], or an earlier one in an artifact of an earlier program.
    pub schema: u32,
    /// Name that the publisher gave.
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    pub created_at_unix: u64,
    /// Engine that wrote the state and alone can read it.
    pub engine: String,
    /// Format of the state; absent if the engine is not known here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_format: Option<u32>,
    pub memory_mib: u32,
    pub vcpus: u8,
    pub cpu: Cpu,
    /// Every blob, each once, in the order of the page index.
    pub blobs: Vec<Blob>,
    /// Number of the state in `blobs`, as all numbers below.
    pub state: usize,
    pub memory: Memory,
    pub disks: Vec<Disk>,
    pub source: Source,
    /// The parent was booted from the base of its disks, so it can be booted from there again.
    pub booted: bool,
    pub versions: Versions,
    /// Empty disk slots behind the disks, which the state knows of.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub spare_disks: u8,
}

fn is_zero(count: &u8) -> bool {
    *count == 0
}

/// The CPU that the guest saw.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    /// `host`, or `baseline` for x86-64-v2.
    pub model: String,
    /// Vendor string of the CPU.
    pub vendor: String,
    /// Features that a host must have, as in `/proc/cpuinfo`.
    pub features: Vec<String>,
}

/// A blob by the digest of its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    pub digest: Digest,
    pub bytes: u64,
}

/// Guest memory as layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    pub layers: Vec<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<usize>,
}

/// One disk: a base and thin layers over it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    pub base: usize,
    pub layers: Vec<usize>,
    pub read_only: bool,
    pub serial: String,
}

/// Origin of the machine, for people.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    pub image: String,
    pub kernel: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_digest: Option<Digest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initramfs_digest: Option<Digest>,
    pub cmdline: String,
}

/// Versions of the programs that wrote the machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    pub forkd: String,
    pub vmm: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub agent: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub numpy: String,
}

impl Config {
    /// Parses a configuration and checks every number in it.
    pub fn parse(bytes: &[u8]) -> Result<Self, HubError> {
        #[derive(Deserialize)]
        struct Probe {
            schema: u32,
        }
        let probe: Probe = parse(bytes, "the configuration")?;
        if !(OLDEST..=SCHEMA).contains(&probe.schema) {
            return Err(HubError::Version {
                what: "a configuration of schema",
                found: probe.schema.to_string(),
                known: format!("{OLDEST} to {SCHEMA}"),
            });
        }
        let config: Self = parse(bytes, "the configuration")?;
        config.check()?;
        Ok(config)
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        to_bytes(self)
    }

    fn check(&self) -> Result<(), HubError> {
        bounded("blobs", self.blobs.len() as u64, limits::BLOBS as u64)?;
        let disks = self.disks.len() + usize::from(self.spare_disks);
        bounded("disks", disks as u64, MAX_DISKS as u64)?;
        for blob in &self.blobs {
            bounded("bytes in a blob", blob.bytes, limits::BLOB)?;
        }
        if self.names().any(|number| number >= self.blobs.len()) {
            return Err(HubError::invalid("the configuration names a missing blob"));
        }
        let texts = [
            &self.name,
            &self.engine,
            &self.cpu.model,
            &self.cpu.vendor,
            &self.source.image,
            &self.source.kernel,
            &self.source.cmdline,
        ];
        let long = texts.iter().any(|text| text.len() > 4096);
        if long || self.cpu.features.len() > 512 {
            return Err(HubError::invalid("a text of the configuration is too long"));
        }
        Ok(())
    }

    /// Numbers of all blobs that the machine uses; some repeat.
    fn names(&self) -> impl Iterator<Item = usize> {
        std::iter::once(self.state)
            .chain(self.memory.layers.iter().copied())
            .chain(self.memory.index)
            .chain(self.disk_blobs())
    }

    /// Numbers of the blobs that disks need; some repeat.
    pub fn disk_blobs(&self) -> impl Iterator<Item = usize> {
        let layers = self.disks.iter().flat_map(|disk| disk.layers.iter());
        let bases = self.disks.iter().map(|disk| disk.base);
        bases.chain(layers.copied())
    }

    /// Numbers of the bases of disks.
    pub fn bases(&self) -> impl Iterator<Item = usize> {
        self.disks.iter().map(|disk| disk.base)
    }

    /// The page index describes the same blobs.
    pub fn check_blobs(&self, blobs: &[BlobMap]) -> Result<(), HubError> {
        let same =
            self.blobs.len() == blobs.len()
                && self.blobs.iter().zip(blobs).all(|(ours, theirs)| {
                    ours.digest == theirs.digest && ours.bytes == theirs.bytes
                });
        if same {
            return Ok(());
        }
        Err(HubError::invalid(
            "the page index and the configuration name different blobs",
        ))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub fn example() -> Config {
        let blob = |n: u8, bytes| Blob {
            digest: Digest([n; 32]),
            bytes,
        };
        Config {
            schema: SCHEMA,
            name: "py".into(),
            description: None,
            created_at_unix: 1,
            engine: "forkd".into(),
            state_format: Some(1),
            memory_mib: 1,
            vcpus: 1,
            cpu: Cpu::default(),
            blobs: vec![blob(1, 8192), blob(2, 1 << 20), blob(3, 100)],
            state: 2,
            memory: Memory {
                layers: vec![1],
                index: None,
            },
            disks: vec![Disk {
                base: 0,
                layers: vec![0],
                read_only: false,
                serial: "root".into(),
            }],
            source: Source::default(),
            booted: true,
            versions: Versions::default(),
            spare_disks: 0,
        }
    }

    #[test]
    fn a_configuration_is_read_as_it_was_written() {
        let config = example();
        assert_eq!(Config::parse(&config.to_bytes()).unwrap(), config);
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        let refused = |change: &dyn Fn(&mut Config)| {
            let mut bad = example();
            change(&mut bad);
            assert!(Config::parse(&bad.to_bytes()).is_err(), "{bad:?}");
        };
        refused(&|c| c.schema = SCHEMA + 1);
        refused(&|c| c.schema = OLDEST - 1);
        refused(&|c| c.spare_disks = 4);
        refused(&|c| c.state = 3);
        refused(&|c| c.memory.layers = vec![9]);
        refused(&|c| c.memory.index = Some(3));
        refused(&|c| c.disks[0].base = 3);
        refused(&|c| c.disks[0].layers = vec![usize::MAX]);
        refused(&|c| c.blobs[0].bytes = limits::BLOB + 1);
        refused(&|c| c.name = "x".repeat(5000));
    }
}
