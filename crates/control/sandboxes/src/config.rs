//! How the daemon keeps and limits sandboxes, checked.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use forkd_types::{NodeName, Policy, Rule};

/// How the daemon keeps and limits sandboxes.
#[derive(Debug, Clone)]
pub struct Config {
    /// Everything that is kept.
    pub data_dir: PathBuf,
    /// Directory of the sockets.
    pub run_dir: PathBuf,
    /// The state database.
    pub state_file: PathBuf,
    /// Path of `forkd-spawn`.
    pub spawn_program: PathBuf,
    /// Path of `forkd-image`.
    pub image_program: PathBuf,
    /// Path of an installed Firecracker. Without one there is no engine `firecracker`.
    pub firecracker: Option<PathBuf>,
    /// How registries are reached; the usual file if none is named.
    pub registries: Option<PathBuf>,
    /// Directories besides the data directory from which kernels and disks may be taken.
    pub allowed_paths: Vec<PathBuf>,
    /// Branches that may be under way at once.
    pub branch_concurrency: usize,
    /// Parents that may be built at once.
    pub max_builds: usize,
    /// Sandboxes there may be.
    pub max_sandboxes: usize,
    /// Sandboxes one owner may have.
    pub max_sandboxes_per_token: usize,
    /// The longest a sandbox may live; none is for ever.
    pub max_lifetime: Option<Duration>,
    /// Bytes that the disks and checkpoints of one sandbox may take on the host; 0 is no limit.
    pub disk_limit_bytes: u64,
    /// Bytes that snapshots may take on disk for one more to be made.
    pub store_limit_bytes: Option<u64>,
    /// Keys whose signatures an artifact must have; without them, any artifact is unpacked.
    pub hub_signers: Option<forkd_hub::sign::Signers>,
    /// Memory in MiB that stays free: a create that would go below is refused.
    pub reserve_mib: u64,
    /// How long a child's agent may take to answer.
    pub ready_timeout: Duration,
    /// Shells that stand ready for the shape used last.
    pub pool: u32,
    /// The name of this host in a fleet.
    pub node: Option<NodeName>,
    pub network: NetworkConfig,
    pub broker: BrokerConfig,
    /// Addresses besides the loopback on which ports may be published.
    pub publish_on: Vec<IpAddr>,
}

/// How the daemon connects sandboxes to the network.
#[derive(Debug, Clone)]
pub struct NetworkConfig {
    /// Path of `forkd-net`.
    pub program: PathBuf,
    /// The policy of sandboxes whose request names none.
    pub default: Policy,
    /// Denials that no policy can override.
    pub floor: Vec<Rule>,
    /// Name servers for the guests; without any, those of the host.
    pub resolvers: Vec<SocketAddr>,
}

/// How the daemon keeps and uses secrets.
#[derive(Debug, Clone)]
pub struct BrokerConfig {
    /// Path of `forkd-broker`.
    pub program: PathBuf,
    /// Certificates in PEM that the broker trusts beside those of the host.
    pub roots: Vec<PathBuf>,
    /// The file with the key of stored secrets.
    pub key_file: PathBuf,
}

impl Config {
    /// A daemon that keeps everything below one directory and starts no VM: what tests begin with.
    pub fn below(root: &Path) -> Self {
        Self {
            data_dir: root.join("data"),
            run_dir: root.join("run"),
            state_file: root.join("state.db"),
            spawn_program: root.join("no-spawn"),
            image_program: root.join("no-image"),
            firecracker: None,
            registries: None,
            allowed_paths: Vec::new(),
            branch_concurrency: 4,
            max_builds: 2,
            max_sandboxes: 10,
            max_sandboxes_per_token: 10,
            max_lifetime: None,
            disk_limit_bytes: 0,
            store_limit_bytes: None,
            hub_signers: None,
            reserve_mib: 0,
            ready_timeout: Duration::from_secs(1),
            pool: 0,
            node: None,
            network: NetworkConfig {
                program: root.join("no-net"),
                default: Policy::none(),
                floor: Vec::new(),
                resolvers: Vec::new(),
            },
            broker: BrokerConfig {
                program: root.join("no-broker"),
                roots: Vec::new(),
                key_file: root.join("secrets.key"),
            },
            publish_on: Vec::new(),
        }
    }

    /// The arguments of `forkd-spawn` for the engines besides forkd's own.
    pub fn engine_arguments(&self) -> Vec<OsString> {
        let Some(program) = &self.firecracker else {
            return Vec::new();
        };
        vec![
            "--firecracker".into(),
            program.into(),
            "--firecracker-dir".into(),
            self.data_dir.join("firecracker").into(),
            "--snapshots".into(),
            (&self.data_dir).into(),
        ]
    }
}
