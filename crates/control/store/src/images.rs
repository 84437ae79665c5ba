//! Installed images, which parents are built from.

use std::io;
use std::path::PathBuf;

use forkd_types::{Tag, path_error};

use crate::error::StoreError;
use crate::sparse::{Sizes, sizes};
use crate::store::Store;

/// The disk of an image.
const ROOTFS: &str = "root.ext4";

/// An image in the data directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Images follow the rules for names of tags.
    pub name: Tag,
    pub dir: PathBuf,
    /// The root disk.
    pub rootfs: PathBuf,
    /// Size of the root disk.
    pub sizes: Sizes,
}

impl Store {
    /// An image by name.
    pub fn image(&self, name: &Tag) -> Result<Image, StoreError> {
        let dir = self.layout().images().join(name.as_str());
        let rootfs = dir.join(ROOTFS);
        let sizes = match std::fs::File::open(&rootfs).and_then(|file| sizes(&file)) {
            Ok(sizes) => sizes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(StoreError::NoImage {
                    name: name.to_string(),
                });
            }
            Err(error) => return Err(path_error("open", rootfs)(error).into()),
        };
        Ok(Image {
            name: name.clone(),
            dir,
            rootfs,
            sizes,
        })
    }

    /// Every image, in order.
    pub fn images(&self) -> Result<Vec<Image>, StoreError> {
        let dir = self.layout().images();
        let mut all = Vec::new();
        for entry in std::fs::read_dir(&dir).map_err(path_error("read", &dir))? {
            let name = entry.map_err(path_error("read", &dir))?.file_name();
            let Some(name) = name.to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            match self.image(&name) {
                Ok(image) => all.push(image),
                Err(StoreError::NoImage { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }
}
