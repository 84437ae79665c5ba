//! An image that was found: its configuration and its layers, not yet unpacked.

use std::fs::File;
use std::path::PathBuf;

use crate::archive::Archive;
use crate::auth::{Credential, Helpers};
use crate::config::Config;
use crate::digest::Digest;
use crate::error::OciError;
use crate::layout::Layout;
use crate::manifest::Platform;
use crate::name::ImageName;
use crate::part::Part;
use crate::registries::Registries;
use crate::registry::{self, Blobs, Pull};
use crate::source::Source;
use crate::{engine, limits, stream};

/// A layer and the digest that its plain bytes must have. Only a plain archive promises none.
#[derive(Debug, Clone)]
pub struct Layer {
    pub blob: Part,
    pub diff_id: Option<Digest>,
}

/// An image that was found.
#[derive(Debug)]
pub struct Image {
    /// Names the content: the digest of the manifest, or what stands for it.
    pub digest: Digest,
    pub config: Config,
    /// From the lowest.
    pub layers: Vec<Layer>,
}

impl Image {
    /// An image whose layers must have the digests that the configuration promises, in the same order.
    pub(crate) fn new(digest: Digest, config: Config, blobs: Vec<Part>) -> Result<Self, OciError> {
        if config.diff_ids.len() != blobs.len() {
            return Err(OciError::LayerCount {
                configured: config.diff_ids.len(),
                found: blobs.len(),
            });
        }
        let promised = config.diff_ids.iter().map(|digest| Some(*digest));
        let layers = blobs
            .into_iter()
            .zip(promised)
            .map(|(blob, diff_id)| Layer { blob, diff_id })
            .collect();
        Ok(Self {
            digest,
            config,
            layers,
        })
    }
}

/// How sources that are not files are reached.
pub struct Means<'a> {
    pub platform: &'a Platform,
    pub registries: &'a Registries,
    /// For the registry of the image.
    pub credential: Option<Credential>,
    pub auth_files: Vec<PathBuf>,
    pub helpers: Helpers,
    /// Where blobs of registries stay.
    pub blobs: PathBuf,
    /// Where archives that arrive as a stream lie until they are read. Files there have no names.
    pub spool: PathBuf,
    pub told: &'a mut dyn FnMut(registry::Progress),
}

/// Finds an image. Of an image that is here already only what names it is read; layers are read by
/// [`crate::layer::unpack`].
pub fn open(source: &Source, means: Means<'_>) -> Result<Image, OciError> {
    let wanted = means.platform;
    match source {
        Source::Layout { folder, name } => {
            Layout::Folder(folder.clone()).image(name.as_deref(), wanted)
        }
        Source::OciArchive { file, name } => {
            Layout::Archive(Archive::open(file)?).image(name.as_deref(), wanted)
        }
        Source::DockerArchive { file, name } => Archive::open(file)?.docker_image(name.as_deref()),
        Source::Tar { file: path } => {
            root(File::open(path).map_err(OciError::io("open", path))?, path)
        }
        Source::Registry(name) => from_registry(name, means),
        Source::Stdin => stream::any(std::io::stdin().lock(), wanted, &means.spool),
        Source::Engine { engine, name } => {
            stream::any(engine::export(*engine, name)?, wanted, &means.spool)
        }
        Source::Folder { folder } => root(stream::folder(folder, &means.spool)?, folder),
    }
}

fn from_registry(name: &ImageName, means: Means<'_>) -> Result<Image, OciError> {
    let blobs = Blobs::at(means.blobs)?;
    let pull = Pull {
        name,
        platform: means.platform,
        registries: means.registries,
        credential: means.credential,
        auth_files: means.auth_files,
        helpers: means.helpers,
    };
    let image = registry::pull(&pull, &blobs, means.told);
    let image = image.map_err(|error| OciError::Registry(Box::new(error)))?;
    // The layers are open: what is removed here is still read.
    blobs.trim(limits::KEPT_BLOBS)?;
    Ok(image)
}

/// An image of a root file system without a configuration.
pub(crate) fn root(file: File, path: &std::path::Path) -> Result<Image, OciError> {
    let blob = Part::whole(file).map_err(OciError::io("read", path))?;
    let mut hasher = crate::digest::Hasher::default();
    let mut reader = blob.reader();
    std::io::copy(&mut reader, &mut hasher).map_err(OciError::io("read", path))?;
    Ok(Image {
        digest: hasher.finish(),
        config: Config::default(),
        layers: vec![Layer {
            blob,
            diff_id: None,
        }],
    })
}
