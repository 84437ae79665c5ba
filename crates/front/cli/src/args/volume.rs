//! Arguments of `forkd volume`, and volumes of new sandboxes.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use forkd_api::{VolumeMode, VolumeMount};
use forkd_types::MiB;

use super::DaemonArgs;

/// Volumes of new sandboxes.
#[derive(Debug, Clone, Default, Args)]
pub struct VolumeArgs {
    /// Mount a volume; the mode is rw (one sandbox writes), ro or clone (a private copy); repeatable, at most 3
    #[arg(long = "volume", value_name = "NAME:PATH[:MODE]", value_parser = mount)]
    pub volumes: Vec<VolumeMount>,
}

/// Parses a mount in the form `NAME:PATH[:MODE]`.
fn mount(text: &str) -> Result<VolumeMount, String> {
    let form = || "write NAME:PATH or NAME:PATH:MODE, with the mode rw, ro or clone".to_owned();
    let (name, rest) = text.split_once(':').ok_or_else(form)?;
    let (path, mode) = match rest.rsplit_once(':') {
        Some((path, "rw")) => (path, VolumeMode::Rw),
        Some((path, "ro")) => (path, VolumeMode::Ro),
        Some((path, "clone")) => (path, VolumeMode::Clone),
        Some(_) => return Err(form()),
        None => (rest, VolumeMode::Rw),
    };
    if name.contains('/') {
        return Err(
            "a file of the host is not a volume: create one with `forkd volume create NAME --from FILE`"
                .into(),
        );
    }
    if name.is_empty() || !path.starts_with('/') {
        return Err(form());
    }
    Ok(VolumeMount {
        name: name.to_owned(),
        path: path.to_owned(),
        mode,
    })
}

/// A volume of a new parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VolumeSource {
    Volume(VolumeMount),
    /// An ext4 image of this host, which becomes a volume.
    File {
        file: PathBuf,
        path: String,
        mode: VolumeMode,
    },
}

/// Parses a volume of a parent: `NAME:PATH[:MODE]` or `FILE:PATH[:MODE]`, where a file has a slash. Children of the parent
/// get copies, so the mode rw means a private copy.
pub(super) fn source(text: &str) -> Result<VolumeSource, String> {
    let (name, rest) = text.split_once(':').unwrap_or((text, ""));
    let file = name.contains('/').then(|| PathBuf::from(name));
    // The rest is parsed as that of a volume with any name.
    let parsed = match &file {
        Some(_) => mount(&format!("file:{rest}"))?,
        None => mount(text)?,
    };
    let mode = match parsed.mode {
        VolumeMode::Rw => VolumeMode::Clone,
        other => other,
    };
    let path = parsed.path.clone();
    Ok(match file {
        Some(file) => VolumeSource::File { file, path, mode },
        None => VolumeSource::Volume(VolumeMount { mode, ..parsed }),
    })
}

/// Arguments of `forkd volume`.
#[derive(Debug, Args)]
#[command(
    after_help = "A volume is a disk that outlives sandboxes. Forks and branches of a sandbox get a clone of it.\n\nExamples:\n  \
    forkd volume create data --size 2G             create an empty volume\n  \
    forkd spawn --tag py --volume data:/data       start a sandbox that writes it\n  \
    forkd spawn --tag py -n 9 --volume data:/data:clone\n                                                 nine private copies\n  \
    forkd volume commit sb-… data                  make the copy of one sandbox the content of the volume"
)]
pub struct VolumeCommandArgs {
    #[command(subcommand)]
    pub command: VolumeCommand,
    /// Print the result as JSON
    #[arg(long, global = true)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Subcommands of `forkd volume`.
#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// Create an empty volume with an ext4 file system
    Create {
        /// Name of the volume
        name: String,
        /// Size of the disk; space is used as data is written
        #[arg(long, default_value = "1G", value_name = "SIZE")]
        size: MiB,
        /// Begin with the ext4 image in this file, which has the size of the volume
        #[arg(long, value_name = "FILE", conflicts_with = "size")]
        from: Option<PathBuf>,
    },
    /// List all volumes of this user
    #[command(visible_alias = "list")]
    Ls,
    /// Describe one volume
    Inspect {
        /// Name of the volume
        name: String,
    },
    /// Delete volumes that no sandbox writes
    Rm {
        /// Names of the volumes
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Make what a sandbox has in a volume the content of that volume
    Commit {
        /// ID of the sandbox
        sandbox: String,
        /// Name of the volume
        name: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_has_copies_of_volumes_and_of_files() {
        let copy = |mode| {
            VolumeSource::Volume(VolumeMount {
                name: "data".into(),
                path: "/x".into(),
                mode,
            })
        };
        assert_eq!(source("data:/x:rw").unwrap(), copy(VolumeMode::Clone));
        assert_eq!(source("data:/x:ro").unwrap(), copy(VolumeMode::Ro));
        let file = VolumeSource::File {
            file: "./a.ext4".into(),
            path: "/x".into(),
            mode: VolumeMode::Ro,
        };
        assert_eq!(source("./a.ext4:/x:ro").unwrap(), file);
        for bad in ["/a.ext4", "/a.ext4:x", "data", "data:x:ro"] {
            assert!(source(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn volumes_read_as_they_are_written() {
        let parsed = mount("data:/mnt/x").unwrap();
        assert_eq!(
            (parsed.name.as_str(), parsed.mode),
            ("data", VolumeMode::Rw)
        );
        assert_eq!(mount("data:/x:clone").unwrap().mode, VolumeMode::Clone);
        assert_eq!(mount("data:/x:ro").unwrap().path, "/x");
        for bad in ["data", "data:x", ":/x", "data:/x:rx", "/img.ext4:/x:ro"] {
            assert!(mount(bad).is_err(), "{bad}");
        }
    }
}
