//! The archive of a client on its way into a file.

use std::path::PathBuf;
use std::sync::Arc;

use forkd_api::{BuildImage, ErrorCode};
use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;
use tokio::io::AsyncWriteExt;

use crate::context::Context;

/// The largest archive.
const MAX_BYTES: u64 = 8 << 30;

/// A folder below the staging folder of images, removed when this is dropped. A daemon that was killed removes it at its
/// next start.
#[derive(Debug)]
pub struct Folder {
    pub path: PathBuf,
}

impl Folder {
    pub async fn make(app: &Arc<App>) -> Result<Self, Error> {
        let name = format!("build-{}", hex::encode(rand::random::<[u8; 8]>()));
        let path = app.store.layout().fetching().join(name);
        app.blocking(move |_| {
            std::fs::create_dir_all(&path).map_err(Error::io("make", &path))?;
            Ok(Self { path })
        })
        .await
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// An archive that is being received.
pub struct Upload {
    folder: Folder,
    file: tokio::fs::File,
    bytes: u64,
}

impl Upload {
    pub async fn begin(app: &Arc<App>) -> Result<Self, Error> {
        app.check_open()?;
        let folder = Folder::make(app).await?;
        let path = folder.path.join("context.tar");
        let file = tokio::fs::File::create_new(&path).await;
        Ok(Self {
            file: file.map_err(Error::io("make", &path))?,
            folder,
            bytes: 0,
        })
    }

    /// Takes the next bytes.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.bytes += bytes.len() as u64;
        if self.bytes > MAX_BYTES {
            return Err(Error::hinted(
                ErrorCode::TooLarge,
                format!("the context is larger than {} GiB", MAX_BYTES >> 30),
                "leave files out with .dockerignore",
            ));
        }
        let written = self.file.write_all(bytes).await;
        written.map_err(Error::io("write to", &self.folder.path))
    }

    /// Reads the whole archive. The file is gone when the context is dropped.
    pub async fn finish(mut self, app: &Arc<App>) -> Result<(BuildImage, Context), Error> {
        let path = self.folder.path.join("context.tar");
        let flushed = self.file.flush().await;
        flushed.map_err(Error::io("write to", &path))?;
        app.blocking(move |_| {
            let file = std::fs::File::open(&path).map_err(Error::io("open", &path))?;
            let read = Context::read(file);
            // The descriptor is all that is needed from now on.
            drop(self);
            read
        })
        .await
    }
}
