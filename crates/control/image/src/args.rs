//! The command line.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

/// Makes guest kernels, initramfs files and root images from Debian's packages.
///
/// Results lie in $XDG_CACHE_HOME/forkd (~/.cache/forkd) and are made once; standard output has
/// their paths.
#[derive(Debug, Parser)]
#[command(name = "forkd-image", version, max_term_width = 100)]
pub struct Args {
    /// The Debian mirror, instead of the one the host's apt uses.
    #[arg(long, global = true, env = "FORKD_DEBIAN_MIRROR", value_name = "URL")]
    pub mirror: Option<String>,
    /// Print a JSON object instead of paths.
    #[arg(long, global = true)]
    pub json: bool,
    /// Say nothing on standard error but errors.
    #[arg(long, short, global = true)]
    pub quiet: bool,
    /// Make it anew with the mirror's current packages even if the cache has it.
    #[arg(long, global = true)]
    pub refresh: bool,
    /// What to make.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// The guest kernel: Debian's cloud kernel, or one of your own.
    Kernel(KernelArgs),
    /// The initramfs: the modules a guest needs, and the agent as its first process.
    Initramfs(InitramfsArgs),
    /// A root image out of a recipe.
    Build(BuildArgs),
    /// Kernel, initramfs and the image of a recipe where a daemon looks for them.
    Install(InstallArgs),
    /// The image of the machine that `forkd machine` starts.
    Machine(MachineArgs),
}

/// Which kernel.
#[derive(Debug, Clone, ClapArgs)]
pub struct OwnKernel {
    /// A vmlinux or bzImage of your own instead of Debian's kernel.
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Its modules: a folder such as /lib/modules/6.12.1. Without it, everything is taken to be
    /// built in.
    #[arg(long, value_name = "DIR", requires = "kernel")]
    pub modules: Option<PathBuf>,
}

/// Arguments of `kernel`.
#[derive(Debug, Clone, ClapArgs)]
pub struct KernelArgs {
    /// Which kernel.
    #[command(flatten)]
    pub own: OwnKernel,
    /// Copy the kernel folder here as well.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// Arguments of `initramfs`.
#[derive(Debug, Clone, ClapArgs)]
pub struct InitramfsArgs {
    /// A kernel folder, as `forkd-image kernel` makes it. Without it, the one in the cache.
    #[arg(long, value_name = "DIR")]
    pub kernel_dir: Option<PathBuf>,
    /// The agent, a static program. Without it, the forkd-agent beside this program.
    #[arg(long, value_name = "FILE")]
    pub agent: Option<PathBuf>,
    /// Copy the initramfs here as well.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Who it is for.
    #[arg(long, value_enum, default_value_t = FlavourArg::Guest)]
    pub flavour: FlavourArg,
}

/// Arguments of `build`.
#[derive(Debug, Clone, ClapArgs)]
pub struct BuildArgs {
    /// The folder of a recipe, or the name of one that comes with the program: python-numpy.
    pub recipe: String,
    /// Copy the disk here as well, and its record beside it with the ending .json.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// Arguments of `install`.
#[derive(Debug, Clone, ClapArgs)]
pub struct InstallArgs {
    /// The folder of a recipe, or the name of one that comes with the program: python-numpy.
    pub recipe: String,
    /// The daemon's --data-dir.
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
    /// Which kernel.
    #[command(flatten)]
    pub own: OwnKernel,
    /// The agent, a static program. Without it, the forkd-agent beside this program.
    #[arg(long, value_name = "FILE")]
    pub agent: Option<PathBuf>,
    /// Copy the machine's folder here as well.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// Who an initramfs is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FlavourArg {
    /// A microVM.
    Guest,
    /// The machine that `forkd machine` starts.
    Machine,
}
