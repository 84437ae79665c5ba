//! Where an image lies, as a user writes it.
//!
//! ```text
//! oci:FOLDER[:NAME]            an OCI layout in a folder
//! oci-archive:FILE[:NAME]      an OCI layout in a tar archive
//! docker-archive:FILE[:NAME]   what `docker save` writes
//! tar:FILE                     a plain root file system
//! dir:FOLDER                   a root file system in a folder
//! docker-daemon:NAME           an image of a running Docker
//! podman:NAME                  an image of a running Podman
//! -                            an archive of any of these kinds, on standard input
//! [docker://]NAME              an image in a registry
//! ```

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use thiserror::Error;

use crate::engine::Engine;
use crate::name::{ImageName, NameError};

/// Where an image lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// An OCI layout in a folder.
    Layout {
        folder: PathBuf,
        name: Option<String>,
    },
    /// An OCI layout in a tar archive.
    OciArchive { file: PathBuf, name: Option<String> },
    /// An archive of Docker.
    DockerArchive { file: PathBuf, name: Option<String> },
    /// A root file system without a configuration.
    Tar { file: PathBuf },
    /// The same, in a folder.
    Folder { folder: PathBuf },
    /// An image of an engine that runs on this host.
    Engine { engine: Engine, name: String },
    /// An archive on standard input.
    Stdin,
    /// An image in a registry.
    Registry(ImageName),
}

/// Text that names no source.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SourceError {
    #[error(
        "{text:?} is neither the name of an image nor a source; write NAME:TAG, or oci:, oci-archive:, \
         docker-archive:, tar: or dir: and a path, or docker-daemon: or podman: and a name, or -"
    )]
    NoKind { text: String },
    #[error("the image cannot be looked for")]
    Name(#[from] NameError),
    #[error("{kind}: names no path")]
    NoPath { kind: &'static str },
}

impl FromStr for Source {
    type Err = SourceError;

    fn from_str(text: &str) -> Result<Self, SourceError> {
        let split = |kind: &'static str| text.strip_prefix(kind).and_then(|t| t.strip_prefix(':'));
        if let Some(rest) = split("oci-archive") {
            let (file, name) = path_and_name("oci-archive", rest)?;
            return Ok(Self::OciArchive { file, name });
        }
        if let Some(rest) = split("docker-archive") {
            let (file, name) = path_and_name("docker-archive", rest)?;
            return Ok(Self::DockerArchive { file, name });
        }
        if let Some(rest) = split("oci") {
            let (folder, name) = path_and_name("oci", rest)?;
            return Ok(Self::Layout { folder, name });
        }
        if let Some(rest) = split("tar") {
            let file = path("tar", rest)?;
            return Ok(Self::Tar { file });
        }
        if let Some(rest) = split("dir") {
            let folder = path("dir", rest)?;
            return Ok(Self::Folder { folder });
        }
        for engine in [Engine::Docker, Engine::Podman] {
            if let Some(name) = split(engine.kind()) {
                if name.is_empty() {
                    return Err(SourceError::NoPath {
                        kind: engine.kind(),
                    });
                }
                let name = name.to_owned();
                return Ok(Self::Engine { engine, name });
            }
        }
        if text == "-" {
            return Ok(Self::Stdin);
        }
        // A plain word is the name of a recipe or of an image on this host.
        if text.contains([':', '/', '@']) {
            return Ok(Self::Registry(text.parse()?));
        }
        Err(SourceError::NoKind {
            text: text.chars().take(200).collect(),
        })
    }
}

/// A path ends at the first colon, as with other tools; a name may contain more of them.
fn path_and_name(kind: &'static str, text: &str) -> Result<(PathBuf, Option<String>), SourceError> {
    match text.split_once(':') {
        Some((text, name)) if !name.is_empty() => Ok((path(kind, text)?, Some(name.to_owned()))),
        Some((text, _)) => Ok((path(kind, text)?, None)),
        None => Ok((path(kind, text)?, None)),
    }
}

fn path(kind: &'static str, text: &str) -> Result<PathBuf, SourceError> {
    if text.is_empty() {
        return Err(SourceError::NoPath { kind });
    }
    Ok(PathBuf::from(text))
}

impl Source {
    /// A short name for the image, from the name or the file.
    pub fn short_name(&self) -> String {
        let stem = |path: &std::path::Path| {
            let stem = path.file_stem().map(|stem| stem.to_string_lossy());
            stem.unwrap_or_default().into_owned()
        };
        let last = |name: &str| name.rsplit('/').next().unwrap_or(name).to_owned();
        let text = match self {
            Self::Layout {
                name: Some(name), ..
            }
            | Self::OciArchive {
                name: Some(name), ..
            }
            | Self::DockerArchive {
                name: Some(name), ..
            }
            | Self::Engine { name, .. } => last(name),
            Self::Layout { folder: path, .. }
            | Self::OciArchive { file: path, .. }
            | Self::DockerArchive { file: path, .. }
            | Self::Tar { file: path }
            | Self::Folder { folder: path } => stem(path),
            Self::Stdin => "image".into(),
            Self::Registry(name) => name.short(),
        };
        let mut short: String = text
            .chars()
            .map(|c| match c {
                'a'..='z' | '0'..='9' | '-' | '.' | '_' => c,
                'A'..='Z' => c.to_ascii_lowercase(),
                _ => '-',
            })
            .take(64)
            .collect();
        if !short.starts_with(|c: char| c.is_ascii_alphanumeric()) {
            short.insert_str(0, "image");
        }
        short
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, path, name) = match self {
            Self::Layout { folder, name } => ("oci", folder, name.as_deref()),
            Self::OciArchive { file, name } => ("oci-archive", file, name.as_deref()),
            Self::DockerArchive { file, name } => ("docker-archive", file, name.as_deref()),
            Self::Tar { file } => ("tar", file, None),
            Self::Folder { folder } => ("dir", folder, None),
            Self::Engine { engine, name } => return write!(f, "{}:{name}", engine.kind()),
            Self::Stdin => return f.write_str("-"),
            Self::Registry(name) => return name.fmt(f),
        };
        write!(f, "{kind}:{}", path.display())?;
        name.map_or(Ok(()), |name| write!(f, ":{name}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_reads_as_it_is_written() {
        for text in [
            "oci:/a/b",
            "oci:/a/b:latest",
            "oci-archive:x.tar:a:b",
            "docker-archive:x.tar:python:3",
            "tar:root.tar",
            "dir:/a/b",
            "docker-daemon:app:1",
            "podman:localhost/app:1",
            "-",
            "python:3-slim",
            "registry.example:5000/a/b:1",
        ] {
            let source: Source = text.parse().unwrap();
            assert_eq!(source.to_string(), text);
        }
    }

    #[test]
    fn what_names_nothing_is_refused_with_the_kinds() {
        let error = "python-numpy".parse::<Source>().unwrap_err();
        assert!(error.to_string().contains("oci-archive:"), "{error}");
        let error = "Python:3".parse::<Source>().unwrap_err();
        assert!(matches!(error, SourceError::Name(_)), "{error}");
        assert_eq!(
            "tar:".parse::<Source>(),
            Err(SourceError::NoPath { kind: "tar" })
        );
    }

    #[test]
    fn a_short_name_is_a_tag() {
        let name = |text: &str| text.parse::<Source>().unwrap().short_name();
        assert_eq!(name("oci:/x/y:library/Python:3"), "python-3");
        assert_eq!(name("docker-archive:/x/My App.tar"), "my-app");
        assert_eq!(name("tar:/x/_.tar"), "image_");
        assert_eq!(name("registry.example/a/python:3-slim"), "python-3-slim");
        assert_eq!(name("podman:localhost/app:1"), "app-1");
    }
}
