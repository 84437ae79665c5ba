//! The command line of `forkd-image`, as clap types. No behaviour.
//!
//! `--mirror`, `--json`, `--quiet` and `--refresh` apply to every command. Doc comments of fields are help texts.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use forkd_oci::manifest::Platform;

/// Builds guest kernels, initramfs files and root images from Debian's packages.
///
/// Results are cached in $XDG_CACHE_HOME/forkd (~/.cache/forkd). Their paths go to standard output.
#[derive(Debug, Parser)]
#[command(name = "forkd-image", version, max_term_width = 100)]
pub struct Args {
    /// The Debian mirror [default: the mirror of the host's apt].
    #[arg(long, global = true, env = "FORKD_DEBIAN_MIRROR", value_name = "URL")]
    pub mirror: Option<String>,
    /// Print a JSON object instead of paths.
    #[arg(long, global = true)]
    pub json: bool,
    /// Print no progress on standard error, only errors.
    #[arg(long, short, global = true)]
    pub quiet: bool,
    /// Build again with the mirror's current packages, even if the cache has a result.
    #[arg(long, global = true)]
    pub refresh: bool,
    /// The subcommand to run.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands of `forkd-image`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Get the guest kernel: Debian's cloud kernel, or a kernel of your own.
    Kernel(KernelArgs),
    /// Build the initramfs: the modules that a guest needs, and the agent as its first process.
    Initramfs(InitramfsArgs),
    /// Build a root image from a recipe or from a container image.
    Build(BuildArgs),
    /// Install kernel, initramfs and the image of a recipe or of a container for a daemon.
    Install(InstallArgs),
    /// Build the image of the machine that `forkd machine` starts.
    Machine(MachineArgs),
    /// Make the disk of a container image for a daemon, confined to two folders and the network.
    ///
    /// The first line on standard input is the request, in JSON; an archive may follow. Each line on standard
    /// output is a JSON object: progress, then the result.
    #[command(hide = true)]
    Fetch(FetchArgs),
}

/// Arguments that replace Debian's kernel.
#[derive(Debug, Clone, ClapArgs)]
pub struct OwnKernel {
    /// Use this vmlinux or bzImage instead of Debian's kernel.
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Its modules: a folder such as /lib/modules/6.12.1 [default: all modules are built in].
    #[arg(long, value_name = "DIR", requires = "kernel")]
    pub modules: Option<PathBuf>,
}

/// Arguments of `kernel`.
#[derive(Debug, Clone, ClapArgs)]
pub struct KernelArgs {
    /// The kernel to use.
    #[command(flatten)]
    pub own: OwnKernel,
    /// Also copy the kernel folder to this path.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// Arguments of `initramfs`.
#[derive(Debug, Clone, ClapArgs)]
pub struct InitramfsArgs {
    /// A kernel folder, as `forkd-image kernel` makes it [default: the one in the cache].
    #[arg(long, value_name = "DIR")]
    pub kernel_dir: Option<PathBuf>,
    /// The agent, a static program [default: the forkd-agent beside this program].
    #[arg(long, value_name = "FILE")]
    pub agent: Option<PathBuf>,
    /// Also copy the initramfs to this path.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// The kind of VM that boots it.
    #[arg(long, value_enum, default_value_t = FlavourArg::Guest)]
    pub flavour: FlavourArg,
}

/// The arguments that name an image.
#[derive(Debug, Clone, ClapArgs)]
pub struct What {
    /// A recipe: its folder, or the name of a built-in one, such as python-numpy. Or a container image:
    /// NAME:TAG or NAME@DIGEST in a registry, oci:FOLDER[:NAME], oci-archive:FILE[:NAME],
    /// docker-archive:FILE[:NAME], docker-daemon:NAME, podman:NAME, - for an archive on standard input, or
    /// tar:FILE or dir:FOLDER for a plain root.
    #[arg(value_name = "RECIPE|IMAGE")]
    pub recipe: String,
    /// The name of a container image here [default: from the name or file of the image].
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// The size of the disk of a container image, in MiB; only what is used takes space [default: 8192].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(64..=1 << 22))]
    pub disk_mib: Option<u32>,
    /// How registries are reached.
    #[command(flatten)]
    pub registry: RegistryArgs,
}

/// How registries are reached.
#[derive(Debug, Clone, ClapArgs)]
pub struct RegistryArgs {
    /// The platform to choose, such as linux/amd64 [default: that of the guests].
    #[arg(long, value_name = "OS/ARCH")]
    pub platform: Option<Platform>,
    /// The registry of names without a host: HOST or HOST/PATH [default: that of the file].
    #[arg(long, value_name = "HOST[/PATH]", env = "FORKD_REGISTRY")]
    pub registry: Option<String>,
    /// Mirrors, certificates and the default registry [default: /etc/forkd/registries.toml].
    #[arg(long, value_name = "FILE", env = "FORKD_REGISTRIES")]
    pub registries: Option<PathBuf>,
    /// The file of credentials [default: those of Docker and Podman].
    #[arg(long, value_name = "FILE")]
    pub auth_file: Option<PathBuf>,
    /// The user name for the registry of the image.
    #[arg(long, value_name = "NAME", requires = "password_file")]
    pub username: Option<String>,
    /// The file with the password of that user; - is standard input.
    #[arg(long, value_name = "FILE", requires = "username")]
    pub password_file: Option<PathBuf>,
}

/// Arguments of `fetch`.
#[derive(Debug, Clone, ClapArgs)]
pub struct FetchArgs {
    /// An empty folder for the image.
    #[arg(long, value_name = "DIR")]
    pub into: PathBuf,
    /// The folder in which layers stay.
    #[arg(long, value_name = "DIR")]
    pub blobs: PathBuf,
    /// Mirrors, certificates and the default registry [default: /etc/forkd/registries.toml].
    #[arg(long, value_name = "FILE")]
    pub registries: Option<PathBuf>,
}

/// Arguments of `build`.
#[derive(Debug, Clone, ClapArgs)]
pub struct BuildArgs {
    /// The image to build.
    #[command(flatten)]
    pub what: What,
    /// Also copy the disk to this path, and its record beside it with the extension .json.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// Arguments of `install`.
#[derive(Debug, Clone, ClapArgs)]
pub struct InstallArgs {
    /// The image to build.
    #[command(flatten)]
    pub what: What,
    /// The --data-dir of the daemon.
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/var/lib/forkd",
        env = "FORKD_DATA_DIR"
    )]
    pub data_dir: PathBuf,
}

/// Arguments of `machine`.
#[derive(Debug, Clone, ClapArgs)]
pub struct MachineArgs {
    /// The kernel to use.
    #[command(flatten)]
    pub own: OwnKernel,
    /// The agent, a static program [default: the forkd-agent beside this program].
    #[arg(long, value_name = "FILE")]
    pub agent: Option<PathBuf>,
    /// Also copy the machine's folder to this path.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// The kind of VM that an initramfs is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FlavourArg {
    /// A microVM, the guest of a sandbox.
    Guest,
    /// The machine that `forkd machine` starts.
    Machine,
}
