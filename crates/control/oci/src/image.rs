//! An image that was found: its configuration and its layers, not yet unpacked.

use std::fs::File;

use crate::archive::Archive;
use crate::config::Config;
use crate::digest::Digest;
use crate::error::OciError;
use crate::layout::Layout;
use crate::manifest::Platform;
use crate::part::Part;
use crate::source::Source;

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

/// Finds an image. Reads only what names it; layers are read by [`crate::layer::unpack`].
pub fn open(source: &Source, wanted: &Platform) -> Result<Image, OciError> {
    match source {
        Source::Layout { folder, name } => {
            Layout::Folder(folder.clone()).image(name.as_deref(), wanted)
        }
        Source::OciArchive { file, name } => {
            Layout::Archive(Archive::open(file)?).image(name.as_deref(), wanted)
        }
        Source::DockerArchive { file, name } => Archive::open(file)?.docker_image(name.as_deref()),
        Source::Tar { file: path } => {
            let file = File::open(path).map_err(OciError::io("open", path))?;
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
    }
}
