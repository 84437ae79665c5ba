//! Arguments of the commands about images.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use forkd_types::MiB;

use super::DaemonArgs;

/// How a container image is found.
#[derive(Debug, Clone, Args)]
pub struct PullArgs {
    /// When the registry is asked
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = PullWhen::IfMissing)]
    pub pull: PullWhen,
    /// The registry of names without a host: HOST or HOST/PATH [default: that of the daemon]
    #[arg(long, value_name = "HOST[/PATH]", env = "FORKD_REGISTRY")]
    pub registry: Option<String>,
    /// The file of credentials [default: those of Docker and Podman]
    #[arg(long, value_name = "FILE")]
    pub auth_file: Option<PathBuf>,
    /// The user name for the registry of the image
    #[arg(long, value_name = "NAME", requires = "password_file")]
    pub registry_user: Option<String>,
    /// The file with the password of that user; - is standard input
    #[arg(long, value_name = "FILE", requires = "registry_user")]
    pub password_file: Option<PathBuf>,
    /// The size of the disk, such as 20G; only what is used takes space on the host [default: 8G]
    #[arg(long, value_name = "SIZE")]
    pub disk: Option<MiB>,
}

/// When a registry is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PullWhen {
    /// If no image was fetched under the same name before
    IfMissing,
    /// Always; layers that are here are not fetched again
    Always,
}

/// Arguments of `forkd image`.
#[derive(Debug, Args)]
#[command(
    after_help = "IMAGE is NAME:TAG or NAME@DIGEST in a registry, oci:FOLDER, oci-archive:FILE, docker-archive:FILE,\n\
    docker-daemon:NAME, podman:NAME, tar:FILE or dir:FOLDER for a plain root, or - for an archive on\n\
    standard input.\n\nExamples:\n  \
    forkd image pull registry.example/python:3-slim   fetch an image\n  \
    docker save app:1 | forkd image pull - --name app  take an image of Docker\n  \
    forkd image inspect app                            show how its programs run\n  \
    forkd image check postgres                         run its check in ten children\n  \
    forkd image prune                                  remove fetched images without a snapshot"
)]
pub struct ImageArgs {
    #[command(subcommand)]
    pub command: ImageCommand,
    /// Print JSON instead of text
    #[arg(long, global = true)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// The subcommands of `forkd image`.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Fetch a container image
    Pull {
        /// Name or source of the image
        image: String,
        /// The name of the image here [default: from its name and digest]
        #[arg(long)]
        name: Option<String>,
        #[command(flatten)]
        pull: PullArgs,
    },
    /// List all installed images
    Ls,
    /// Show where an image came from and how its programs run
    Inspect {
        /// Name of the image
        name: String,
    },
    /// Fork an image and run the check of its recipe in every child
    ///
    /// Boots a parent, prepares it as the recipe says, forks it, runs the check in each child, and deletes
    /// parent and children. Exits with 1 if the check failed in a child.
    Check {
        /// Name of the image
        name: String,
        /// Number of children
        #[arg(short, long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
        n: u32,
    },
    /// Remove images; snapshots that were booted from them stay
    Rm {
        /// Names of images
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Remove fetched images that no snapshot was booted from, and fetched layers
    Prune,
}

/// Arguments of `forkd from-image`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    forkd from-image registry.example/python:3-slim --tag py    fetch, boot, freeze")]
pub struct FromImageArgs {
    /// The image, as for `forkd image pull`, or the name of an installed one
    pub image: String,
    /// Tag of the new snapshot
    #[arg(long)]
    pub tag: String,
    /// Guest memory, such as 512M or 2G [default: that of the image]
    #[arg(long, visible_alias = "mem-size-mib", value_name = "SIZE")]
    pub memory: Option<MiB>,
    /// Number of vCPUs [default: that of the image]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=32))]
    pub vcpus: Option<u8>,
    #[command(flatten)]
    pub pull: PullArgs,
    /// Accepted for compatibility; the file is sparse
    #[arg(long, hide = true, value_name = "N")]
    pub size_mib: Option<u32>,
    /// Accepted for compatibility
    #[arg(long, hide = true, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// Accepted for compatibility
    #[arg(long, hide = true, value_name = "NAME")]
    pub tap: Option<String>,
    /// Accepted for compatibility: the snapshot is made when the agent answers
    #[arg(long, hide = true, value_name = "SECONDS")]
    pub boot_wait_secs: Option<u64>,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}
