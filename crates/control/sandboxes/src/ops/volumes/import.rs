//! Imports: a volume from an ext4 image that a client sends.
//!
//! The image is untrusted. The host reads its superblock and nothing else; only kernels of guests mount it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use forkd_api::{ErrorCode, VolumeInfo};
use forkd_store::Staging;
use forkd_types::Tag;

use super::{SIZES, content, enter_new};
use crate::app::App;
use crate::error::Error;

const FILE: &str = "volume.ext4";
/// Bytes between two looks at the limit of the store.
const LOOK: u64 = 256 << 20;
/// Sizes of disks are multiples of this.
const BLOCK: u64 = 4096;

/// An import under way. Dropping it removes what has arrived.
#[derive(Debug)]
pub struct Import {
    staging: Staging,
    file: Arc<File>,
    bytes: u64,
    /// Position at which the limit of the store is looked at again.
    look: u64,
}

impl Import {
    /// Refuses everything that can be refused before the first byte.
    pub fn begin(app: &App, name: &Tag) -> Result<Self, Error> {
        app.check_open()?;
        app.limits.store_room(&app.store)?;
        app.volumes.check_free(name)?;
        let staging = app.store.stage();
        let staging = staging.map_err(Error::store("no place to write a volume"))?;
        let file = staging.create(FILE);
        let file = file.map_err(Error::store("no place to write a volume"))?;
        Ok(Self {
            staging,
            file: Arc::new(file),
            bytes: 0,
            look: LOOK,
        })
    }

    /// Takes the next piece. Pieces of zeroes take no space.
    pub async fn write(&mut self, app: &Arc<App>, piece: Vec<u8>) -> Result<(), Error> {
        let at = self.bytes;
        self.bytes += piece.len() as u64;
        if self.bytes > SIZES.end() << 20 {
            return Err(invalid("the image has more than 1 TiB"));
        }
        if piece.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        if self.bytes > self.look {
            self.look = self.bytes + LOOK;
            app.limits.store_room(&app.store)?;
        }
        let (file, path) = (Arc::clone(&self.file), self.staging.file(FILE));
        app.blocking(move |_| {
            file.write_all_at(&piece, at)
                .map_err(Error::io("write", &path))
        })
        .await
    }

    /// Enters the volume. It is durable when this returns.
    pub async fn finish(
        self,
        app: &Arc<App>,
        name: Tag,
        owner: String,
    ) -> Result<VolumeInfo, Error> {
        let bytes = self.bytes;
        let mib = bytes.div_ceil(1 << 20);
        if !SIZES.contains(&mib) || !bytes.is_multiple_of(BLOCK) {
            return Err(invalid(
                "an image has 8 MiB to 1 TiB, and a multiple of 4096 bytes",
            ));
        }
        let (base, clean) = app
            .blocking(move |app| {
                let path = self.staging.file(FILE);
                self.file
                    .set_len(bytes)
                    .map_err(Error::io("write", &path))?;
                if !content::is_ext4(&self.file).map_err(Error::io("read", &path))? {
                    return Err(invalid("the image does not hold an ext4 file system"));
                }
                let base = content::durable(app, &path)?;
                let clean = content::is_clean(app, &base.blob, &[])?;
                Ok((base, clean))
            })
            .await?;
        enter_new(app, name, owner, &base.blob, clean).await
    }
}

fn invalid(message: &str) -> Error {
    Error::hinted(
        ErrorCode::InvalidRequest,
        message,
        "make an image with `mke2fs -t ext4 FILE SIZE`, without partitions",
    )
}
