//! Makes a root from a container image.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use forkd_oci::digest::Digest;
use forkd_oci::layer::{self, Budget};
use forkd_oci::source::Source;
use forkd_oci::{Image, Layer, Means, OciError};
use thiserror::Error;

use super::layer::{LayerError, Layers};
use super::tree::{Meta, Node, Tree, TreeError};
use super::{ImageSource, Root, RootError, RootSource, RunDefaults};
use crate::progress::Progress;

/// Raised when the same image would become another root.
const LAYOUT: &str = "oci 1";
/// Why a container image gave no root.
#[derive(Debug, Error)]
pub enum OciRootError {
    #[error("the image {image} cannot be used")]
    Image {
        image: String,
        #[source]
        source: OciError,
    },
    #[error("the layers of {image} do not make a root")]
    Layer {
        image: String,
        #[source]
        source: LayerError,
    },
    #[error("{image} runs its programs as {user}, and it has no such user")]
    NoUser { image: String, user: String },
    #[error("the working folder {folder} of {image} cannot be made")]
    WorkingDir {
        image: String,
        folder: String,
        #[source]
        source: TreeError,
    },
    #[error("cannot remove {}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// A container image as a source of roots.
#[derive(Debug)]
pub struct OciRoot {
    name: String,
    image: Image,
}

impl OciRoot {
    /// Finds the image, and fetches it if it is in a registry. Its layers are read by [`RootSource::fetch`].
    pub fn open(source: &Source, means: Means<'_>) -> Result<Self, OciRootError> {
        let full = match source {
            Source::Registry(name) => means.registries.complete(name).ok(),
            _ => None,
        };
        let name = full.map_or_else(|| source.to_string(), |name| name.to_string());
        match forkd_oci::open(source, means) {
            Ok(image) => Ok(Self { name, image }),
            Err(source) => Err(OciRootError::Image {
                image: name,
                source,
            }),
        }
    }

    /// The image with its registry, as it is recorded.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Names the content.
    pub fn digest(&self) -> Digest {
        self.image.digest
    }

    fn unpack(
        &self,
        layer: &Layer,
        what: &str,
        work: &Path,
        budget: &mut Budget,
    ) -> Result<File, OciRootError> {
        let path = work.join("layer.tar");
        let unpacked = layer::unpack(&layer.blob, what, layer.diff_id, &path, budget);
        let (file, _) = unpacked.map_err(|source| OciRootError::Image {
            image: self.name.clone(),
            source,
        })?;
        // The tree holds it open as long as it needs it; a build that is killed leaves nothing.
        std::fs::remove_file(&path).map_err(|source| OciRootError::Io { path, source })?;
        Ok(file)
    }

    fn make(&self, work: &Path, progress: &Progress) -> Result<Root, OciRootError> {
        let step = progress.step(&format!("unpacking {}", self.name));
        let mut tree = Tree::default();
        let mut budget = Budget::default();
        let mut layers = Layers::new(&mut tree, work);
        for (number, layer) in self.image.layers.iter().enumerate() {
            let what = format!("layer {} of {}", number + 1, self.image.layers.len());
            let file = self.unpack(layer, &what, work, &mut budget)?;
            layers.add(file).map_err(|source| OciRootError::Layer {
                image: self.name.clone(),
                source,
            })?;
            step.note(&what);
        }
        self.check_user(&tree)?;
        self.make_working_dir(&mut tree)?;
        step.done(&format!("{} entries", tree.iter().count()));
        let config = &self.image.config;
        Ok(Root {
            tree,
            packages: Vec::new(),
            source: ImageSource::Oci {
                image: self.name.clone(),
                digest: self.image.digest.to_string(),
            },
            kernel: None,
            env: config.env.clone(),
            run: RunDefaults {
                user: config.user.clone(),
                working_dir: config.working_dir.clone(),
                entrypoint: config.entrypoint.clone(),
                cmd: config.cmd.clone(),
                ports: config.ports.clone(),
                stop_signal: config.stop_signal.clone(),
                healthcheck: config.healthcheck.clone(),
            },
        })
    }

    /// A user that the image does not have is an error now, and not with the first command.
    fn check_user(&self, tree: &Tree) -> Result<(), OciRootError> {
        let user = self.image.config.user.as_deref().unwrap_or("0");
        let name = user.split(':').next().unwrap_or(user);
        if name.parse::<u32>().is_ok() {
            return Ok(());
        }
        let path = tree.through_links("etc/passwd").unwrap_or_default();
        let passwd = tree.read(&path).unwrap_or_default();
        let known = String::from_utf8_lossy(&passwd)
            .lines()
            .any(|line| line.split(':').next() == Some(name));
        if known {
            return Ok(());
        }
        Err(OciRootError::NoUser {
            image: self.name.clone(),
            user: user.to_owned(),
        })
    }

    /// The working folder need not be in a layer: a runtime makes it.
    fn make_working_dir(&self, tree: &mut Tree) -> Result<(), OciRootError> {
        let Some(folder) = &self.image.config.working_dir else {
            return Ok(());
        };
        let failed = |source| OciRootError::WorkingDir {
            image: self.name.clone(),
            folder: folder.clone(),
            source,
        };
        // The last part may be a link, too.
        let inside = tree.through_links(&format!("{folder}/.")).map_err(failed)?;
        if tree.get(&inside).is_none() {
            let made = tree.put(&inside, Node::Directory(Meta::root(0o755)));
            made.map_err(failed)?;
        }
        Ok(())
    }
}

impl RootSource for OciRoot {
    fn fingerprint(&self) -> Vec<u8> {
        serde_json::json!([LAYOUT, self.image.digest.to_string()])
            .to_string()
            .into_bytes()
    }

    fn fetch(&self, work: &Path, progress: &Progress) -> Result<Root, RootError> {
        Ok(self.make(work, progress).map_err(Box::new)?)
    }
}
