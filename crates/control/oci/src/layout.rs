//! An OCI layout: `index.json` and blobs named by their digests, in a folder or in an archive.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::archive::Archive;
use crate::config::Config;
use crate::digest::Digest;
use crate::error::OciError;
use crate::image::Image;
use crate::limits;
use crate::manifest::{Descriptor, Document, Index, Manifest, Platform};
use crate::part::Part;

const INDEX: &str = "index.json";

/// Where the files of a layout lie.
#[derive(Debug)]
pub enum Layout {
    Folder(PathBuf),
    Archive(Archive),
}

impl Layout {
    fn path(&self) -> &Path {
        match self {
            Self::Folder(folder) => folder,
            Self::Archive(archive) => archive.path(),
        }
    }

    fn file(&self, name: &str) -> Result<Option<Part>, OciError> {
        match self {
            Self::Archive(archive) => Ok(archive.get(name)),
            Self::Folder(folder) => {
                let path = folder.join(name);
                match File::open(&path) {
                    Ok(file) => Ok(Some(
                        Part::whole(file).map_err(OciError::io("read", &path))?,
                    )),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                    Err(error) => Err(OciError::io("open", &path)(error)),
                }
            }
        }
    }

    fn blob(&self, digest: Digest) -> Result<Part, OciError> {
        let name = format!("blobs/sha256/{}", digest.hex());
        self.file(&name)?.ok_or(OciError::NoBlob { digest })
    }

    /// The bytes of a small blob, checked against its digest.
    fn checked(&self, digest: Digest, what: &str, limit: u64) -> Result<Vec<u8>, OciError> {
        let bytes = read(&self.blob(digest)?, what, limit)?;
        digest.check(what, Digest::of(&bytes))?;
        Ok(bytes)
    }

    /// Finds the image with this name for a platform.
    pub fn image(&self, name: Option<&str>, wanted: &Platform) -> Result<Image, OciError> {
        let index = self.file(INDEX)?.ok_or_else(|| OciError::NotAnImage {
            path: self.path().to_owned(),
            name: INDEX,
            kind: "an OCI layout",
        })?;
        let bytes = read(&index, INDEX, limits::MANIFEST)?;
        let Document::Index(index) = Document::parse(&bytes, INDEX)? else {
            return Err(OciError::Kind {
                what: INDEX.into(),
                found: "a manifest".into(),
            });
        };
        let entries = index.named(name)?.into_iter().cloned().collect();
        let (digest, manifest) = resolve(Index { manifests: entries }, wanted, |digest, what| {
            self.checked(digest, what, limits::MANIFEST)
        })?;
        self.assemble(digest, &manifest)
    }

    fn assemble(&self, digest: Digest, manifest: &Manifest) -> Result<Image, OciError> {
        let what = format!("the configuration {}", manifest.config.digest);
        let bytes = self.checked(manifest.config.digest, &what, limits::CONFIG)?;
        let blobs = manifest
            .layers
            .iter()
            .map(|layer: &Descriptor| self.blob(layer.digest));
        Image::new(
            digest,
            Config::parse(&bytes)?,
            blobs.collect::<Result<_, _>>()?,
        )
    }
}

/// Follows indexes to a manifest. `get` gives the bytes of a document, checked against its digest.
pub(crate) fn resolve<E: From<OciError>>(
    mut index: Index,
    wanted: &Platform,
    get: impl Fn(Digest, &str) -> Result<Vec<u8>, E>,
) -> Result<(Digest, Manifest), E> {
    for _ in 0..limits::INDEX_DEPTH {
        let digest = index.choose(wanted)?.digest;
        let what = format!("the manifest {digest}");
        match Document::parse(&get(digest, &what)?, &what)? {
            Document::Manifest(manifest) => return Ok((digest, manifest)),
            Document::Index(next) => index = next,
        }
    }
    Err(E::from(OciError::Limit {
        what: "the number of indexes that lead to one another".into(),
        found: limits::INDEX_DEPTH as u64 + 1,
        limit: limits::INDEX_DEPTH as u64,
    }))
}

/// The bytes of a small file.
pub(crate) fn read(part: &Part, what: &str, limit: u64) -> Result<Vec<u8>, OciError> {
    if part.length > limit {
        return Err(OciError::Limit {
            what: format!("the size of {what}"),
            found: part.length,
            limit,
        });
    }
    part.read().map_err(|source| OciError::Unpack {
        what: what.to_owned(),
        source,
    })
}
