//! Records of sandboxes and workspaces in the state database.
//!
//! [`SandboxRecord`] and [`WorkspaceRecord`] are stored as JSON. Each has a version: the daemon does not read a record of
//! a later version than [`RECORD_VERSION`]. A field that was added later has a default.

use std::collections::BTreeMap;

use forkd_api::{VolumeMode, VolumeMount};
use forkd_store::{BlobRef, Cpu, MemoryManifest, Parent, Source};
use forkd_types::{Digest, Engine, SandboxId, Tag};
use forkd_vmm_proto::ImageId;
use serde::{Deserialize, Serialize};

use super::network::NetworkRecord;
use super::ports::PortsRecord;
use crate::host_limits::HostLimits;

/// Where a sandbox was when it was last written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoredState {
    /// Its creation has not been answered yet: after a restart it is ended.
    Launching,
    /// It was acknowledged.
    Running,
    /// It was acknowledged and stands still.
    Paused,
    /// It ended by itself; kept so that people can see why.
    Failed,
    /// It is being deleted: after a restart that is brought to its end.
    Stopping,
}

impl StoredState {
    /// As it is in the table.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Launching => "launching",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Failed => "failed",
            Self::Stopping => "stopping",
        }
    }
}

/// The version of stored records. A record of a later version is not read.
pub const RECORD_VERSION: u32 = 1;

fn first_version() -> u32 {
    1
}

/// The end of a sandbox whose time is over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnExpiry {
    /// It is deleted.
    #[default]
    Delete,
    /// Its state is written down, and a resume starts it again under its ID.
    Suspend,
}

/// The stored state of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxRecord {
    /// The version of the record.
    #[serde(default = "first_version")]
    pub version: u32,
    pub id: SandboxId,
    /// Where it was.
    pub state: StoredState,
    /// The snapshot it was started from.
    pub tag: Tag,
    /// Digest of that snapshot's manifest.
    pub manifest: Digest,
    /// The VMM process, once there is one.
    pub pid: Option<u32>,
    /// Who made it.
    pub owner: String,
    /// When it was made.
    pub created_at_unix: u64,
    /// When it is to be deleted.
    #[serde(default)]
    pub expires_at_unix: Option<u64>,
    /// Whether it is deleted or suspended then.
    #[serde(default)]
    pub on_expiry: OnExpiry,
    /// Limit on host memory.
    #[serde(default)]
    pub memory_limit_mib: Option<u64>,
    /// The other limits on host resources.
    #[serde(default)]
    pub limits: HostLimits,
    /// The network policy; a record of a daemon without networks has none.
    #[serde(default)]
    pub network: NetworkRecord,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Environment of every program that is started through an API.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Free data of the client.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// The workspace it belongs to.
    #[serde(default)]
    pub workspace: Option<String>,
    /// Host name in the guest.
    #[serde(default)]
    pub hostname: Option<String>,
    /// From the request to the agent's answer.
    #[serde(default)]
    pub ready_us: Option<u64>,
    /// Why it failed.
    #[serde(default)]
    pub failure: Option<String>,
    /// How often it was branched.
    #[serde(default)]
    pub branch_count: u32,
    /// Where the memory of its last branch lies.
    #[serde(default)]
    pub last_branch_memory_path: Option<String>,
    /// The engine of its VM.
    #[serde(default = "own_engine")]
    pub engine: Engine,
    pub memory_mib: u32,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Which CPU the guest sees.
    pub cpu: Cpu,
    /// The memory it was restored from.
    pub memory: MemoryManifest,
    pub disks: Vec<DiskStack>,
    /// The boot source of the root of its chain.
    pub source: Source,
    /// The memory that the next cut builds on; the memory it was restored from if missing.
    #[serde(default)]
    pub built: Option<BuiltRecord>,
    /// Points it can go back to, the oldest first.
    #[serde(default)]
    pub checkpoints: Vec<CheckpointRecord>,
    /// It is about to go back to this checkpoint.
    #[serde(default)]
    pub rolling_back: Option<String>,
    /// How many layers it has been given.
    #[serde(default)]
    pub layer_count: usize,
    /// Bytes on disk of the layers of its snapshot, which do not count against its own limit.
    #[serde(default)]
    pub inherited_disk_bytes: u64,
    /// Version of the agent.
    #[serde(default)]
    pub agent: String,
    /// Version of NumPy in the warm interpreter.
    #[serde(default)]
    pub numpy: String,
    #[serde(default)]
    pub ports: PortsRecord,
    /// A network namespace was asked for.
    #[serde(default)]
    pub per_child_netns: bool,
    /// Its name, if the daemon could make one.
    #[serde(default)]
    pub netns: Option<String>,
    /// Empty disk slots behind its disks.
    #[serde(default)]
    pub spare_disks: u8,
    /// Disks that belong to volumes.
    #[serde(default)]
    pub volumes: Vec<VolumeUse>,
}

/// A volume that a sandbox uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeUse {
    pub name: Tag,
    /// Where the guest has it mounted.
    pub path: String,
    pub mode: VolumeMode,
    /// Number of the disk.
    pub slot: usize,
    /// ID of the volume, which a later volume of the same name does not have.
    pub volume: u64,
    /// The generation of the volume that the disk began with.
    pub generation: u64,
}

/// The only engine there was before records named one.
fn own_engine() -> Engine {
    Engine::FORKD
}

/// The memory of the last cut that succeeded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuiltRecord {
    /// The number by which the VMM knows it.
    pub image: ImageId,
    pub memory: MemoryManifest,
}

/// A point a sandbox can go back to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointRecord {
    pub name: String,
    /// The number by which the VMM knows it.
    pub id: u64,
    /// When it was made.
    pub created_at_unix: u64,
    /// How long the sandbox stood still.
    pub pause_us: u64,
    /// Bytes of memory it holds.
    pub bytes: u64,
    /// The layers of each disk that lie below it.
    pub disks: Vec<Vec<LayerRef>>,
    /// The volumes as they were, with their generations.
    #[serde(default)]
    pub volumes: Vec<VolumeUse>,
}

/// One disk of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStack {
    /// The image at the bottom.
    pub base: BlobRef,
    /// Thin layers, the oldest first. A layer is added before the VMM is told of it, so the list may hold
    /// an empty one that the VMM does not use, but it never lacks one that it does.
    pub layers: Vec<LayerRef>,
    /// The guest may not write.
    pub read_only: bool,
    /// The serial number that the guest sees.
    pub serial: String,
}

/// A layer of a sandbox's disk.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerRef {
    /// Frozen content in the store.
    Blob(BlobRef),
    /// A file in the sandbox's own directory.
    Own(String),
}

impl SandboxRecord {
    /// The volumes that the sandbox writes.
    pub fn written_volumes(&self) -> impl Iterator<Item = &VolumeUse> {
        let used = self.volumes.iter();
        used.filter(|used| used.mode == VolumeMode::Rw)
    }

    /// Whether a disk is a volume that the sandbox writes.
    pub fn writes_volume(&self, slot: usize) -> bool {
        self.written_volumes().any(|used| used.slot == slot)
    }
}

impl VolumeUse {
    /// As users see it.
    pub fn shown(&self) -> VolumeMount {
        VolumeMount {
            name: self.name.to_string(),
            path: self.path.clone(),
            mode: self.mode,
        }
    }
}

impl DiskStack {
    /// The content it consists of over its base, the oldest first.
    pub fn frozen(&self) -> Vec<BlobRef> {
        self.layers
            .iter()
            .filter_map(|layer| match layer {
                LayerRef::Blob(blob) => Some(*blob),
                LayerRef::Own(_) => None,
            })
            .collect()
    }
}

impl SandboxRecord {
    /// A sandbox of which only the ID is known.
    pub fn unreadable(id: SandboxId) -> Self {
        Self {
            version: RECORD_VERSION,
            id,
            state: StoredState::Failed,
            tag: "unknown".parse().expect("a constant that is a valid tag"),
            manifest: Digest([0; 32]),
            pid: None,
            owner: String::new(),
            created_at_unix: 0,
            expires_at_unix: None,
            on_expiry: OnExpiry::Delete,
            memory_limit_mib: None,
            limits: HostLimits::default(),
            network: NetworkRecord::default(),
            labels: BTreeMap::new(),
            env: BTreeMap::new(),
            metadata: BTreeMap::new(),
            workspace: None,
            hostname: None,
            ready_us: None,
            failure: None,
            branch_count: 0,
            last_branch_memory_path: None,
            engine: own_engine(),
            memory_mib: 0,
            vcpus: 0,
            cpu: Cpu::Host,
            memory: MemoryManifest {
                layers: Vec::new(),
                index: None,
            },
            disks: Vec::new(),
            source: Source::default(),
            built: None,
            checkpoints: Vec::new(),
            rolling_back: None,
            layer_count: 0,
            inherited_disk_bytes: 0,
            agent: String::new(),
            numpy: String::new(),
            ports: PortsRecord::default(),
            per_child_netns: false,
            netns: None,
            spare_disks: 0,
            volumes: Vec::new(),
        }
    }

    /// Every blob it uses.
    pub fn blobs(&self) -> Vec<Digest> {
        let mut all = Vec::new();
        for memory in [Some(&self.memory), self.built.as_ref().map(|b| &b.memory)]
            .into_iter()
            .flatten()
        {
            all.extend(memory.layers.iter().map(|blob| blob.digest));
            all.extend(memory.index.map(|blob| blob.digest));
        }
        all.extend(self.disks.iter().map(|disk| disk.base.digest));
        all.extend(self.layers().filter_map(|layer| match layer {
            LayerRef::Blob(blob) => Some(blob.digest),
            LayerRef::Own(_) => None,
        }));
        all
    }

    /// Every layer of a disk it uses, or may go back to.
    pub fn layers(&self) -> impl Iterator<Item = &LayerRef> {
        self.disks.iter().flat_map(|disk| &disk.layers).chain(
            self.checkpoints
                .iter()
                .flat_map(|c| c.disks.iter().flatten()),
        )
    }

    /// The names of those that are files of its own.
    pub fn own_layers(&self) -> Vec<String> {
        self.layers()
            .filter_map(|layer| match layer {
                LayerRef::Own(name) => Some(name.clone()),
                LayerRef::Blob(_) => None,
            })
            .collect()
    }

    /// Replaces a file of its own by content, wherever it is used.
    pub fn layer_is_content(&mut self, name: &str, blob: BlobRef) {
        let everywhere = self
            .disks
            .iter_mut()
            .flat_map(|disk| &mut disk.layers)
            .chain(
                self.checkpoints
                    .iter_mut()
                    .flat_map(|c| c.disks.iter_mut().flatten()),
            );
        for layer in everywhere {
            if matches!(layer, LayerRef::Own(found) if found == name) {
                *layer = LayerRef::Blob(blob);
            }
        }
    }

    /// Names other content of the same bytes, wherever it is used.
    pub fn replace_content(&mut self, from: &Digest, to: BlobRef) {
        let memory = [
            Some(&mut self.memory),
            self.built.as_mut().map(|built| &mut built.memory),
        ];
        let memory = memory
            .into_iter()
            .flatten()
            .flat_map(|memory| memory.layers.iter_mut().chain(&mut memory.index));
        let disks = self.disks.iter_mut().flat_map(|disk| &mut disk.layers);
        let kept = self
            .checkpoints
            .iter_mut()
            .flat_map(|checkpoint| checkpoint.disks.iter_mut().flatten());
        let layers = disks.chain(kept).filter_map(|layer| match layer {
            LayerRef::Blob(blob) => Some(blob),
            LayerRef::Own(_) => None,
        });
        for blob in memory.chain(layers).filter(|blob| blob.digest == *from) {
            *blob = to;
        }
    }

    /// A number for a new layer of a disk that no layer of it has had.
    pub fn layer_number(&self, disk: &DiskStack) -> usize {
        self.layer_count.max(disk.layers.len())
    }

    /// Puts new layers on disks.
    pub fn add_layers<'a>(&mut self, layers: impl Iterator<Item = (usize, &'a String)>) {
        let mut next = self.layer_count;
        for (slot, name) in layers {
            if let Some(disk) = self.disks.get_mut(slot) {
                next = next.max(self.layer_count.max(disk.layers.len()) + 1);
                disk.layers.push(LayerRef::Own(name.clone()));
            }
        }
        self.layer_count = next;
    }

    /// The memory the next cut builds on, and the number by which the VMM knows it.
    pub fn builds_on(&self) -> (&MemoryManifest, ImageId) {
        match &self.built {
            Some(built) => (&built.memory, built.image),
            None => (&self.memory, ImageId::START),
        }
    }

    /// The parent that the manifest of a branch names.
    pub fn as_parent(&self) -> Parent {
        Parent {
            tag: self.tag.clone(),
            digest: self.manifest,
        }
    }
}

/// The stored state of a workspace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkspaceRecord {
    /// The version of the record.
    #[serde(default = "first_version")]
    pub version: u32,
    pub name: Tag,
    pub id: String,
    /// Who made it.
    pub owner: String,
    /// The snapshot that it was first started from.
    pub source: Tag,
    /// Where its state lies.
    #[serde(default)]
    pub state_tag: Option<Tag>,
    #[serde(default)]
    pub sandbox: Option<SandboxId>,
    /// It was suspended on request.
    #[serde(default)]
    pub suspended: bool,
    /// When it was made.
    pub created_at_unix: u64,
    /// When it was last started or suspended.
    pub last_active_unix: u64,
    /// How its sandbox is started.
    #[serde(default)]
    pub per_child_netns: bool,
    /// Limit on host memory.
    #[serde(default)]
    pub memory_limit_mib: Option<u64>,
    /// Where the memory of its last state lies.
    #[serde(default)]
    pub last_branch_memory_path: Option<String>,
    /// The network policy of its sandbox; that of the daemon if missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkRecord>,
    /// Settings of a sandbox that was suspended under its own ID. Such a workspace ends when the sandbox is resumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of_sandbox: Option<Box<SuspendedSandbox>>,
}

/// The settings that a suspended sandbox gets back when it is resumed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SuspendedSandbox {
    #[serde(default)]
    pub on_expiry: OnExpiry,
    #[serde(default)]
    pub limits: HostLimits,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    pub memory_mib: u32,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Size of the root disk.
    pub disk_bytes: u64,
    #[serde(default)]
    pub ports: PortsRecord,
}

#[cfg(test)]
mod tests;
