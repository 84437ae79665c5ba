//! Arguments of `forkd parent`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// Arguments of `forkd parent`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd parent build postgres -o postgres.ext4                  the disk of a recipe\n  \
    forkd parent build registry.example/python:3-slim             the disk of a container image\n  \
    forkd parent build python-numpy --extra jq --extra ripgrep    with more packages of Debian")]
pub struct ParentArgs {
    #[command(subcommand)]
    pub command: ParentCommand,
}

/// The subcommands of `forkd parent`.
#[derive(Debug, Subcommand)]
pub enum ParentCommand {
    /// Build the disk of a recipe or of a container image, and write it to a file
    ///
    /// The image is built by forkd-image on this host and stays in its cache. `forkd snapshot --rootfs FILE`
    /// boots the file.
    Build {
        /// A recipe: its folder or the name of a built-in one. Or a container image, as for `forkd image pull`
        image: String,
        /// The file to write [default: the name of the image with .ext4, in this folder]
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
        /// Size of the disk of a container image in MiB; only what is used takes space [default: 8192]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(64..=1 << 22))]
        size_mib: Option<u32>,
        /// Another package of Debian, for a recipe that starts from Debian
        #[arg(long, value_name = "PACKAGE")]
        extra: Vec<String>,
        /// Print JSON instead of the path
        #[arg(long)]
        json: bool,
    },
}
