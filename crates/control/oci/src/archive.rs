//! A tar archive that holds an image: its entries are found once, and their bytes stay where they are.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use tar::EntryType;

use crate::config::Config;
use crate::digest::Digest;
use crate::error::OciError;
use crate::image::Image;
use crate::layout::read;
use crate::limits;
use crate::part::Part;

const MANIFEST: &str = "manifest.json";
/// Links that lead to one another before a file comes.
const LINKS: usize = 8;

#[derive(Debug)]
enum Entry {
    File(Part),
    /// A link, as a name in the archive.
    Link(String),
}

/// An uncompressed archive.
#[derive(Debug)]
pub struct Archive {
    path: PathBuf,
    entries: BTreeMap<String, Entry>,
}

impl Archive {
    pub fn open(path: &Path) -> Result<Self, OciError> {
        let file = File::open(path).map_err(OciError::io("open", path))?;
        Self::read(file, path)
    }

    /// An archive that is open already; `path` is for people.
    pub(crate) fn read(file: File, path: &Path) -> Result<Self, OciError> {
        let failed = |action| OciError::io(action, path);
        let file = Arc::new(file);
        let mut entries = BTreeMap::new();
        let mut archive = tar::Archive::new(&*file);
        for entry in archive.entries_with_seek().map_err(failed("read"))? {
            let entry = entry.map_err(failed("read"))?;
            if entries.len() >= limits::ARCHIVE_ENTRIES {
                return Err(OciError::Limit {
                    what: format!("the number of entries of {}", path.display()),
                    found: entries.len() as u64 + 1,
                    limit: limits::ARCHIVE_ENTRIES as u64,
                });
            }
            let name = plain(&String::from_utf8_lossy(&entry.path_bytes()));
            let link = entry.link_name_bytes();
            let link = link.map(|target| String::from_utf8_lossy(&target).into_owned());
            match (entry.header().entry_type(), link) {
                (EntryType::Regular | EntryType::Continuous, _) => {
                    let part = Part {
                        file: file.clone(),
                        offset: entry.raw_file_position(),
                        length: entry.size(),
                    };
                    entries.insert(name, Entry::File(part));
                }
                (EntryType::Link, Some(target)) => {
                    entries.insert(name, Entry::Link(plain(&target)));
                }
                (EntryType::Symlink, Some(target)) => {
                    let folder = name.rsplit_once('/').map_or("", |(folder, _)| folder);
                    let target = plain(&format!("{folder}/{target}"));
                    entries.insert(name, Entry::Link(target));
                }
                _ => {}
            }
        }
        Ok(Self {
            path: path.to_owned(),
            entries,
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file with this name. Links are followed inside the archive.
    pub fn get(&self, name: &str) -> Option<Part> {
        let mut entry = self.entries.get(&plain(name))?;
        for _ in 0..LINKS {
            match entry {
                Entry::File(part) => return Some(part.clone()),
                Entry::Link(target) => entry = self.entries.get(target)?,
            }
        }
        None
    }

    /// The image of a Docker archive.
    pub fn docker_image(&self, name: Option<&str>) -> Result<Image, OciError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "PascalCase")]
        struct Saved {
            config: String,
            #[serde(default)]
            repo_tags: Option<Vec<String>>,
            layers: Vec<String>,
        }
        let missing = |name| OciError::NotAnImage {
            path: self.path.clone(),
            name,
            kind: "an archive of Docker",
        };
        let manifest = self.get(MANIFEST).ok_or_else(|| missing(MANIFEST))?;
        let bytes = read(&manifest, MANIFEST, limits::MANIFEST)?;
        let saved: Vec<Saved> =
            serde_json::from_slice(&bytes).map_err(|source| OciError::Syntax {
                what: MANIFEST.into(),
                source,
            })?;
        let tags = || {
            saved
                .iter()
                .flat_map(|saved| saved.repo_tags.iter().flatten().cloned())
                .collect()
        };
        let chosen = match name {
            Some(name) => saved
                .iter()
                .find(|saved| saved.repo_tags.iter().flatten().any(|tag| tag == name)),
            None if saved.len() > 1 => return Err(OciError::Several { there: tags() }),
            None => saved.first(),
        };
        let chosen = chosen.ok_or_else(|| OciError::NoName {
            name: name.unwrap_or_default().to_owned(),
            there: tags(),
        })?;
        let config = self
            .get(&chosen.config)
            .ok_or_else(|| missing("configuration"))?;
        let config = read(&config, "the configuration", limits::CONFIG)?;
        let blobs = chosen.layers.iter().map(|layer| {
            self.get(layer)
                .ok_or_else(|| missing("layer that it names"))
        });
        // Nothing else names the image: its configuration names every layer by digest.
        let digest = Digest::of(&config);
        Image::new(
            digest,
            Config::parse(&config)?,
            blobs.collect::<Result<_, _>>()?,
        )
    }
}

/// The kinds of archives that hold an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ArchiveKind {
    Docker,
    Oci,
    /// The files of a root.
    Root,
}

/// Tells the kind of an archive by the names at its top.
pub(crate) fn kind(file: &File, path: &Path) -> Result<ArchiveKind, OciError> {
    let failed = || OciError::io("read", path);
    let mut found = ArchiveKind::Root;
    let length = file.metadata().map_err(failed())?.len();
    let mut archive = tar::Archive::new(file);
    let entries = archive.entries_with_seek().map_err(failed())?;
    for entry in entries.take(limits::ARCHIVE_ENTRIES) {
        let entry = entry.map_err(failed())?;
        // The reader seeks over contents, so it does not see that one is missing.
        if entry.raw_file_position().saturating_add(entry.size()) > length {
            return Err(failed()(std::io::ErrorKind::UnexpectedEof.into()));
        }
        match plain(&String::from_utf8_lossy(&entry.path_bytes())).as_str() {
            // Newer versions of Docker write both; this one names the tags.
            MANIFEST => return Ok(ArchiveKind::Docker),
            "oci-layout" => found = ArchiveKind::Oci,
            _ => {}
        }
    }
    Ok(found)
}

/// A name without `.`, `..` and doubled slashes. `..` at the top stays at the top.
fn plain(name: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in name.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}
