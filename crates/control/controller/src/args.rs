//! The command line of the daemon.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand};

use forkd_edge::activation;
use forkd_edge::config::{
    AuditLimits, ConnectionLimits, EdgeConfig, ListenAddr, RequestLimits, TlsFiles,
};
use forkd_edge::telemetry::Collector;
use forkd_planes::e2b::E2bConfig;
use forkd_planes::ports::{Domain, PortNames};
use forkd_sandboxes::config::{BrokerConfig, Config, NetworkConfig};
use forkd_types::{Action, Mode, NetLimits, NodeName, Policy, Rule};

const DEFAULT_BIND: &str = "127.0.0.1:8889";
const MIB: u64 = 1 << 20;

/// The daemon that owns every sandbox and snapshot of a host.
#[derive(Debug, Parser)]
#[command(name = "forkd-controller", version, arg_required_else_help = true)]
pub struct Cli {
    /// The subcommand to run.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands of the daemon.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve the REST API
    Serve(Box<ServeArgs>),
    /// Print the OpenAPI document
    Openapi,
    /// Check that no line between the first and the last of an audit log is missing or changed
    VerifyAudit {
        /// The files of the log, the oldest first
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// A digest from the daemon's own log ("head") that must be in the audit log: it shows that the log was not cut
        /// off or written anew
        #[arg(long, value_name = "DIGEST")]
        anchor: Vec<String>,
    },
}

/// Everything the daemon was told, checked.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The front door.
    pub edge: EdgeConfig,
    /// Sandboxes and snapshots.
    pub sandboxes: Config,
    /// How long requests may go on after the daemon was told to stop.
    pub drain: Duration,
    /// Refuse to start if a wall around sandboxes does not stand.
    pub require_jail: bool,
    /// The E2B plane; none unless it is switched on.
    pub e2b: Option<E2bConfig>,
    /// The tools behind `/mcp`, if it is served.
    pub mcp: Option<forkd_mcp::Selection>,
    /// How the daemon is registered in a fleet.
    pub fleet: Option<Fleet>,
    /// The host names of ports.
    pub ports: PortNames,
}

/// How the daemon is registered in a fleet.
#[derive(Debug, Clone)]
pub struct Fleet {
    /// Endpoints of etcd.
    pub etcd: Vec<String>,
    /// The name of the host.
    pub name: NodeName,
    /// The address of the daemon.
    pub url: String,
}

/// Arguments of `forkd-controller serve`.
#[derive(Debug, Args)]
#[command(
    after_help = "SIGTERM and SIGINT stop the daemon; sandboxes go on and are found again at the next start.\n\
SIGHUP reads tokens and certificates again and reopens the audit log."
)]
pub struct ServeArgs {
    /// Where to listen: HOST:PORT or unix:///path; may be given several times
    #[arg(long, value_name = "ADDRESS")]
    listen: Vec<String>,
    /// Where to listen on TCP [default: 127.0.0.1:8889 if nothing else is given and systemd hands over no socket]
    #[arg(long, env = "FORKD_BIND", value_name = "HOST:PORT")]
    bind: Option<String>,
    /// A Unix socket to listen on
    #[arg(long, env = "FORKD_SOCKET", value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Where everything is kept [default: /var/lib/forkd for root, else ~/.local/share/forkd]
    #[arg(long, env = "FORKD_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Where sockets go [default: /run/forkd for root, else $XDG_RUNTIME_DIR/forkd]
    #[arg(long, env = "FORKD_RUN_DIR", value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// The state database [default: state.db in the data directory]
    #[arg(long, env = "FORKD_STATE", value_name = "FILE")]
    state: Option<PathBuf>,
    /// The directory above snapshots/, for those who know it by that name
    #[arg(long, env = "FORKD_SNAPSHOT_ROOT", value_name = "DIR", hide = true)]
    snapshot_root: Option<PathBuf>,
    /// The audit log; empty for none [default: audit.log in the data directory]
    #[arg(long, env = "FORKD_AUDIT_LOG", value_name = "FILE")]
    audit_log: Option<PathBuf>,
    /// MiB at which the audit log is rotated
    #[arg(
        long,
        env = "FORKD_AUDIT_MAX_MIB",
        default_value_t = 64,
        value_name = "MIB"
    )]
    audit_max_mib: u64,
    /// Rotated audit logs that are kept
    #[arg(long, env = "FORKD_AUDIT_KEEP", default_value_t = 4, value_name = "N")]
    audit_keep: u32,
    /// Bearer tokens of administrators: one a line, or name=token, or name=b3:DIGEST
    #[arg(long, env = "FORKD_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Host names, besides localhost and loopback addresses, under which clients without a token may address the daemon
    #[arg(
        long,
        env = "FORKD_ALLOW_HOST",
        value_name = "NAME",
        value_delimiter = ','
    )]
    allow_host: Vec<String>,
    /// TLS certificate chain (PEM)
    #[arg(long, env = "FORKD_TLS_CERT", value_name = "FILE")]
    tls_cert: Option<PathBuf>,
    /// TLS key (PEM)
    #[arg(long, env = "FORKD_TLS_KEY", value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// Taken for compatibility; nothing is prewarmed
    #[arg(
        long,
        env = "FORKD_PREWARM_SCRATCH_DIR",
        value_name = "DIR",
        hide = true
    )]
    prewarm_scratch_dir: Option<PathBuf>,
    /// Directories, besides images/ and kernels/ of the data directory, from which requests may take kernels and disks
    #[arg(
        long,
        env = "FORKD_ALLOW_PATH",
        value_name = "DIR",
        value_delimiter = ':'
    )]
    allow_path: Vec<PathBuf>,
    /// Branches that may be under way at once
    #[arg(
        long,
        env = "FORKD_BRANCH_CONCURRENCY",
        default_value_t = 4,
        value_name = "N"
    )]
    branch_concurrency: usize,
    /// Parents that may be built at once
    #[arg(long, env = "FORKD_MAX_BUILDS", default_value_t = 2, value_name = "N")]
    max_builds: usize,
    /// Sandboxes there may be
    #[arg(
        long,
        env = "FORKD_MAX_SANDBOXES",
        default_value_t = 2000,
        value_name = "N"
    )]
    max_sandboxes: usize,
    /// Sandboxes one owner may have [default: as many as there may be]
    #[arg(long, env = "FORKD_MAX_SANDBOXES_PER_TOKEN", value_name = "N")]
    max_sandboxes_per_token: Option<usize>,
    /// TCP connections per listening address
    #[arg(
        long,
        env = "FORKD_MAX_CONNECTIONS",
        default_value_t = 4096,
        value_name = "N"
    )]
    max_connections: usize,
    /// TCP connections per remote address (IPv6: per /64) [default: a quarter of --max-connections]
    #[arg(long, env = "FORKD_MAX_CONNECTIONS_PER_PEER", value_name = "N")]
    max_connections_per_peer: Option<usize>,
    /// Requests that may be under way at once
    #[arg(
        long,
        env = "FORKD_MAX_REQUESTS",
        default_value_t = 1024,
        value_name = "N"
    )]
    max_requests: usize,
    /// Requests of one owner that may be under way at once [default: half of --max-requests]
    #[arg(long, env = "FORKD_MAX_REQUESTS_PER_OWNER", value_name = "N")]
    max_requests_per_owner: Option<usize>,
    /// Requests each owner may make in a second; 0 for no limit
    #[arg(
        long,
        env = "FORKD_REQUESTS_PER_SECOND",
        default_value_t = 0,
        value_name = "N"
    )]
    requests_per_second: u32,
    /// The longest a sandbox may live, such as 12h [default: for ever]
    #[arg(long, env = "FORKD_MAX_LIFETIME", value_name = "TIME")]
    max_lifetime: Option<humantime::Duration>,
    /// MiB that the disks and checkpoints of one sandbox may take on the host; 0 for no limit
    #[arg(
        long,
        env = "FORKD_DISK_LIMIT_MIB",
        default_value_t = 0,
        value_name = "MIB"
    )]
    disk_limit_mib: u64,
    /// MiB that all snapshots together may take on disk: one more is refused; 0 for no limit
    #[arg(
        long,
        env = "FORKD_STORE_LIMIT_MIB",
        default_value_t = 0,
        value_name = "MIB"
    )]
    store_limit_mib: u64,
    /// File of allowed signers in the format of OpenSSH: artifacts without a signature of one of them are refused
    #[arg(long, env = "FORKD_HUB_SIGNERS", value_name = "FILE")]
    hub_signers: Option<PathBuf>,
    /// MiB of host memory that stay free: a create that would go below is refused
    #[arg(
        long,
        env = "FORKD_RESERVE_MIB",
        default_value_t = 256,
        value_name = "MIB"
    )]
    reserve_mib: u64,
    /// How long a child's agent may take to answer
    #[arg(
        long,
        env = "FORKD_READY_TIMEOUT",
        default_value = "30s",
        value_name = "TIME"
    )]
    ready_timeout: humantime::Duration,
    /// Shells that stand ready for the shape used last; 0 for none
    #[arg(long, env = "FORKD_POOL", default_value_t = 8, value_name = "N")]
    pool: u32,
    /// How long requests may go on after the daemon was told to stop
    #[arg(long, env = "FORKD_DRAIN", default_value = "10s", value_name = "TIME")]
    drain: humantime::Duration,
    /// Refuse to start if one of the walls around sandboxes does not stand on this host; GET /v1/status lists them
    #[arg(long, env = "FORKD_REQUIRE_JAIL")]
    require_jail: bool,
    /// The name of this host in a fleet, five lower-case letters and digits; it becomes part of the IDs of sandboxes
    #[arg(long, env = "FORKD_NODE", value_name = "NAME")]
    node: Option<NodeName>,
    /// An etcd endpoint in which this host is registered for gateways; may be given several times
    #[arg(
        long,
        env = "FORKD_ETCD",
        value_name = "URL",
        value_delimiter = ',',
        requires = "node",
        requires = "advertise"
    )]
    etcd: Vec<String>,
    /// The address under which gateways reach this daemon, such as http://10.0.0.1:8889
    #[arg(long, env = "FORKD_ADVERTISE", value_name = "URL", requires = "etcd")]
    advertise: Option<String>,
    /// Serve tools for models on /mcp: compat, core, all, or names separated by commas [default: core]
    #[arg(
        long,
        env = "FORKD_MCP",
        num_args = 0..=1,
        default_missing_value = "core",
        value_name = "TOOLS"
    )]
    mcp: Option<forkd_mcp::Selection>,
    /// forkd-spawn [default: beside this program]
    #[arg(long, env = "FORKD_SPAWN_PROGRAM", value_name = "PATH")]
    spawn_program: Option<PathBuf>,
    /// Network policy of sandboxes whose request names none: none, public, open or custom; custom denies all
    #[arg(
        long,
        env = "FORKD_NETWORK_DEFAULT",
        default_value_t = Mode::None,
        value_name = "MODE"
    )]
    network_default: Mode,
    /// A rule that no policy can override, such as "deny 203.0.113.0/24" or "deny *:25"; may be given several times
    #[arg(long, env = "FORKD_NETWORK_FLOOR", value_name = "RULE", value_delimiter = ';', value_parser = denial)]
    network_floor: Vec<Rule>,
    /// Name server for the guests, as ADDRESS:PORT; may be given several times [default: those of this host]
    #[arg(
        long,
        env = "FORKD_NETWORK_RESOLVER",
        value_name = "ADDRESS:PORT",
        value_delimiter = ','
    )]
    network_resolver: Vec<SocketAddr>,
    /// forkd-net, the network engine [default: beside this program]
    #[arg(long, env = "FORKD_NET_PROGRAM", value_name = "PATH")]
    net_program: Option<PathBuf>,
    /// forkd-broker, the broker of secrets [default: beside this program]
    #[arg(long, env = "FORKD_BROKER_PROGRAM", value_name = "PATH")]
    broker_program: Option<PathBuf>,
    /// Certificates in PEM that the broker of secrets trusts beside those of this host; may be given several times
    #[arg(
        long,
        env = "FORKD_SECRETS_ROOTS",
        value_name = "FILE",
        value_delimiter = ','
    )]
    secrets_roots: Vec<PathBuf>,
    /// File with the key of stored secrets; 32 bytes, made if missing [default: secrets.key in the data directory]
    #[arg(long, env = "FORKD_SECRETS_KEY", value_name = "FILE")]
    secrets_key: Option<PathBuf>,
    /// forkd-image [default: beside this program]
    #[arg(long, env = "FORKD_IMAGE_PROGRAM", value_name = "PATH")]
    image_program: Option<PathBuf>,
    /// Firecracker, as a second engine [default: firecracker on PATH, if it is there]
    #[arg(long, env = "FORKD_FIRECRACKER", value_name = "PATH")]
    firecracker: Option<PathBuf>,
    /// How registries of container images are reached [default: /etc/forkd/registries.toml if it exists]
    #[arg(long, env = "FORKD_REGISTRIES", value_name = "FILE")]
    registries: Option<PathBuf>,
    /// Serve the protocol of the E2B SDKs on the same addresses
    #[arg(long, env = "FORKD_E2B")]
    e2b: bool,
    /// The domain under which ports of sandboxes have host names, PORT-ID.DOMAIN, with a port if it is not the usual one
    #[arg(
        long,
        env = "FORKD_E2B_DOMAIN",
        value_name = "DOMAIN",
        requires = "e2b"
    )]
    e2b_domain: Option<String>,
    /// A template name of the E2B protocol that stands for a snapshot; may be given several times
    #[arg(
        long,
        env = "FORKD_E2B_TEMPLATE",
        value_name = "NAME=TAG",
        value_delimiter = ',',
        requires = "e2b"
    )]
    e2b_template: Vec<String>,
    /// The domain under which ports of sandboxes have host names, PORT-ID.DOMAIN, with a port if it is not the usual one
    /// [default: --e2b-domain, else localhost with the port of the daemon]
    #[arg(long, env = "FORKD_DOMAIN", value_name = "DOMAIN")]
    domain: Option<String>,
    /// An address, besides those of the loopback, on which ports of sandboxes may be published; may be given several times
    #[arg(
        long,
        env = "FORKD_PUBLISH_ON",
        value_name = "ADDRESS",
        value_delimiter = ','
    )]
    publish_on: Vec<IpAddr>,
    /// Send traces to this OpenTelemetry collector (OTLP over HTTP), such as http://127.0.0.1:4318 [default: none are made]
    #[arg(
        long,
        env = "OTEL_EXPORTER_OTLP_ENDPOINT",
        value_name = "URL",
        hide_env_values = true
    )]
    otlp_endpoint: Option<String>,
    /// Service name of the daemon in traces
    #[arg(
        long,
        env = "OTEL_SERVICE_NAME",
        default_value = "forkd-controller",
        value_name = "NAME"
    )]
    otlp_service_name: String,
    /// Log as JSON
    #[arg(long, env = "FORKD_LOG_JSON")]
    pub log_json: bool,
}

impl ServeArgs {
    /// The Firecracker to offer as an engine: the one that is named, or the one on `PATH`.
    fn firecracker(&self) -> anyhow::Result<Option<PathBuf>> {
        let Some(path) = &self.firecracker else {
            // VMs of Firecracker lack a wall.
            return Ok(on_path("firecracker").filter(|_| !self.require_jail));
        };
        if self.require_jail {
            bail!(
                "--require-jail and --firecracker exclude each other: VMs of Firecracker keep the mounts of the host"
            );
        }
        let path = std::path::absolute(path).context("--firecracker is no path")?;
        if !path.is_file() {
            bail!("--firecracker: there is no program {}", path.display());
        }
        Ok(Some(path))
    }

    /// The settings of the E2B plane, if it is switched on.
    fn e2b(&self) -> anyhow::Result<Option<E2bConfig>> {
        if !self.e2b {
            return Ok(None);
        }
        Ok(Some(E2bConfig::new(
            self.e2b_domain.as_deref().or(self.domain.as_deref()),
            &self.e2b_template,
        )?))
    }

    /// The host names of ports. Names below `localhost` lead to this host without any set-up.
    fn port_names(&self, listen: &[ListenAddr]) -> anyhow::Result<PortNames> {
        let tls = self.tls_cert.is_some();
        let local = listen.iter().find_map(|address| match address {
            ListenAddr::Tcp(address) => Some(format!("localhost:{}", address.port())),
            ListenAddr::Unix(_) => None,
        });
        let text = self.domain.clone().or(self.e2b_domain.clone()).or(local);
        let domain = match text {
            None => None,
            Some(text) => Some(
                Domain::new(&text)
                    .with_context(|| format!("--domain: {text:?} is not a domain in lower case"))?,
            ),
        };
        Ok(PortNames { domain, tls })
    }

    /// Names under which clients without a token may address the daemon. The E2B SDKs make up one of the domain.
    fn allowed_hosts(&self, e2b: Option<&E2bConfig>) -> Vec<String> {
        let api = e2b.and_then(E2bConfig::host);
        let api = api.map(|host| format!("api.{host}"));
        self.allow_host.iter().cloned().chain(api).collect()
    }

    /// The checked settings.
    pub fn settings(&self) -> anyhow::Result<Settings> {
        let listen = self.listen()?;
        let tls = match (&self.tls_cert, &self.tls_key) {
            (Some(cert), Some(key)) => Some(TlsFiles {
                cert: cert.clone(),
                key: key.clone(),
            }),
            (None, None) => None,
            _ => bail!("--tls-cert and --tls-key belong together"),
        };
        if [
            self.branch_concurrency,
            self.max_builds,
            self.max_sandboxes,
            self.max_requests,
        ]
        .contains(&0)
        {
            bail!(
                "--branch-concurrency, --max-builds, --max-sandboxes and --max-requests must be at least 1"
            );
        }
        if self.max_requests_per_owner == Some(0) {
            bail!("--max-requests-per-owner must be at least 1");
        }
        if self.max_connections == 0 || self.max_connections_per_peer == Some(0) {
            bail!("--max-connections and --max-connections-per-peer must be at least 1");
        }
        check_exposure(&listen, self.token_file.as_deref())?;
        let e2b = self.e2b()?;
        let ports = self.port_names(&listen)?;
        let data_dir = self.data_dir()?;
        let edge = EdgeConfig {
            listen,
            audit_log: match &self.audit_log {
                Some(path) if path.as_os_str().is_empty() => None,
                Some(path) => Some(path.clone()),
                None => Some(data_dir.join("audit.log")),
            },
            audit_limits: AuditLimits {
                max_bytes: self.audit_max_mib.max(1).saturating_mul(MIB),
                keep: self.audit_keep,
            },
            token_file: self.token_file.clone(),
            tls,
            connections: ConnectionLimits {
                tcp: self.max_connections,
                per_peer: self
                    .max_connections_per_peer
                    .unwrap_or(self.max_connections.div_ceil(4)),
                ..ConnectionLimits::default()
            },
            requests: RequestLimits {
                total: self.max_requests,
                per_owner: self
                    .max_requests_per_owner
                    .unwrap_or(self.max_requests.div_ceil(2)),
                per_second: self.requests_per_second,
            },
            allowed_hosts: self.allowed_hosts(e2b.as_ref()),
        };
        let sandboxes = Config {
            run_dir: self.run_dir()?,
            state_file: self
                .state
                .clone()
                .unwrap_or_else(|| data_dir.join("state.db")),
            spawn_program: program(self.spawn_program.as_deref(), "forkd-spawn")?,
            image_program: program(self.image_program.as_deref(), "forkd-image")?,
            firecracker: self.firecracker()?,
            registries: self.registries.clone(),
            allowed_paths: self.allow_path.clone(),
            branch_concurrency: self.branch_concurrency,
            max_builds: self.max_builds,
            max_sandboxes: self.max_sandboxes,
            max_sandboxes_per_token: self.max_sandboxes_per_token.unwrap_or(self.max_sandboxes),
            max_lifetime: self.max_lifetime.map(Into::into),
            disk_limit_bytes: self.disk_limit_mib.saturating_mul(MIB),
            store_limit_bytes: (self.store_limit_mib > 0)
                .then_some(self.store_limit_mib.saturating_mul(MIB)),
            hub_signers: self.hub_signers.as_deref().map(signers).transpose()?,
            reserve_mib: self.reserve_mib,
            ready_timeout: Duration::from(self.ready_timeout).max(Duration::from_secs(1)),
            pool: self.pool,
            node: self.node.clone(),
            network: self.network()?,
            broker: self.broker(&data_dir)?,
            publish_on: self.publish_on.clone(),
            data_dir,
        };
        Ok(Settings {
            edge,
            sandboxes,
            drain: self.drain.into(),
            require_jail: self.require_jail,
            e2b,
            mcp: self.mcp.clone(),
            fleet: self.fleet(),
            ports,
        })
    }

    fn fleet(&self) -> Option<Fleet> {
        if self.etcd.is_empty() {
            return None;
        }
        Some(Fleet {
            etcd: self.etcd.clone(),
            name: self.node.clone()?,
            url: self.advertise.clone()?,
        })
    }

    fn network(&self) -> anyhow::Result<NetworkConfig> {
        let default = Policy::new(self.network_default, Vec::new(), NetLimits::default())?;
        Ok(NetworkConfig {
            program: program(self.net_program.as_deref(), "forkd-net")?,
            default,
            floor: self.network_floor.clone(),
            resolvers: self.network_resolver.clone(),
        })
    }

    fn broker(&self, data_dir: &Path) -> anyhow::Result<BrokerConfig> {
        let key_file = self.secrets_key.clone();
        Ok(BrokerConfig {
            program: program(self.broker_program.as_deref(), "forkd-broker")?,
            roots: self.secrets_roots.clone(),
            key_file: key_file.unwrap_or_else(|| data_dir.join("secrets.key")),
        })
    }

    /// Where traces go, if anywhere.
    pub fn collector(&self) -> anyhow::Result<Option<Collector>> {
        self.otlp_endpoint
            .as_deref()
            .filter(|base| !base.is_empty())
            .map(|base| Collector::new(base, &self.otlp_service_name))
            .transpose()
    }

    fn listen(&self) -> anyhow::Result<Vec<ListenAddr>> {
        let mut all = Vec::new();
        for text in &self.listen {
            all.push(match text.strip_prefix("unix://") {
                Some(path) => ListenAddr::Unix(path.into()),
                None => ListenAddr::Tcp(tcp(text.strip_prefix("tcp://").unwrap_or(text))?),
            });
        }
        if let Some(path) = &self.socket {
            all.push(ListenAddr::Unix(path.clone()));
        }
        if let Some(text) = &self.bind {
            all.push(ListenAddr::Tcp(tcp(text)?));
        }
        if all.is_empty() && activation::count() == 0 {
            all.push(ListenAddr::Tcp(tcp(DEFAULT_BIND)?));
        }
        Ok(all)
    }

    fn data_dir(&self) -> anyhow::Result<PathBuf> {
        if let Some(dir) = &self.data_dir {
            return Ok(dir.clone());
        }
        if let Some(dir) = &self.snapshot_root {
            return dir
                .parent()
                .map(Path::to_owned)
                .context("--snapshot-root has no parent");
        }
        forkd_types::data_dir(is_root(), |key| std::env::var_os(key))
            .context("HOME is not set: give --data-dir")
    }

    fn run_dir(&self) -> anyhow::Result<PathBuf> {
        if let Some(dir) = &self.run_dir {
            return Ok(dir.clone());
        }
        if is_root() {
            return Ok("/run/forkd".into());
        }
        let dir = std::env::var_os("XDG_RUNTIME_DIR")
            .filter(|value| !value.is_empty())
            .context("XDG_RUNTIME_DIR is not set: give --run-dir")?;
        Ok(PathBuf::from(dir).join("forkd"))
    }
}

/// A rule for the floor. Only denials can be enforced against every policy.
fn denial(text: &str) -> Result<Rule, String> {
    let rule: Rule = text.parse().map_err(|error| forkd_types::chain(&error))?;
    match rule.action {
        Action::Deny => Ok(rule),
        Action::Allow => Err("a rule of the operator starts with \"deny \"".to_owned()),
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn tcp(text: &str) -> anyhow::Result<SocketAddr> {
    text.replace("localhost:", "127.0.0.1:")
        .parse()
        .with_context(|| format!("{text:?} is no address: write HOST:PORT or unix:///path"))
}

/// Reads the keys whose signatures artifacts must have.
fn signers(path: &Path) -> anyhow::Result<forkd_hub::sign::Signers> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read the signers in {}", path.display()))?;
    forkd_hub::sign::Signers::parse(&text)
        .map_err(|error| anyhow::anyhow!("{} cannot be used: {error}", path.display()))
}

/// Refuses to open a door without a lock.
fn check_exposure(listen: &[ListenAddr], token_file: Option<&Path>) -> anyhow::Result<()> {
    for address in listen {
        if let ListenAddr::Tcp(address) = address
            && !address.ip().is_loopback()
            && token_file.is_none()
        {
            bail!(
                "{address} can be reached from other machines and there is no token: give --token-file, or listen on 127.0.0.1 or a Unix socket"
            );
        }
    }
    Ok(())
}

/// A program by its name, in the folders of `PATH`.
fn on_path(name: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders)
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
}

fn program(given: Option<&Path>, name: &str) -> anyhow::Result<PathBuf> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    let this = std::env::current_exe().context("this program's own path is unknown")?;
    Ok(this.with_file_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(args: &[&str]) -> anyhow::Result<EdgeConfig> {
        let all = [
            "forkd-controller",
            "serve",
            "--data-dir",
            "/d",
            "--run-dir",
            "/r",
        ];
        let cli = Cli::try_parse_from(all.iter().chain(args))?;
        match cli.command {
            Command::Serve(serve) => Ok(serve.settings()?.edge),
            _ => unreachable!(),
        }
    }

    #[test]
    fn addresses_in_every_spelling() {
        let config = config(&[
            "--listen",
            "unix:///tmp/a.sock",
            "--listen",
            "127.0.0.1:1",
            "--bind",
            "localhost:2",
            "--socket",
            "/tmp/b",
        ])
        .unwrap();
        assert_eq!(config.listen.len(), 4);
        assert_eq!(config.listen[0], ListenAddr::Unix("/tmp/a.sock".into()));
        assert_eq!(
            config.listen[3],
            ListenAddr::Tcp("127.0.0.1:2".parse().unwrap())
        );
    }

    #[test]
    fn an_open_door_is_refused() {
        let error = config(&["--bind", "0.0.0.0:8889"]).unwrap_err().to_string();
        assert!(error.contains("--token-file"), "{error}");
        assert!(config(&["--bind", "0.0.0.0:8889", "--token-file", "/t"]).is_ok());
        assert!(config(&[]).is_ok());
    }

    #[test]
    fn contradictions_are_refused() {
        for args in [
            &["--tls-cert", "/c"][..],
            &["--branch-concurrency", "0"],
            &["--bind", "nowhere"],
            &["--max-sandboxes", "0"],
            &["--max-connections", "0"],
            &["--max-connections-per-peer", "0"],
            &["--network-default", "offline"],
            &["--network-floor", "allow public"],
            &["--network-resolver", "host"],
        ] {
            assert!(config(args).is_err(), "{args:?}");
        }
    }
}
