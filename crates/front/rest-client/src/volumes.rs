//! Requests about volumes.

use std::io;

use forkd_api::routes::{self, fill};
use forkd_api::{CreateVolume, VolumeInfo};
use futures::Stream;
use reqwest::{Body, Method};

use crate::{Client, Error};

impl Client {
    /// Lists the volumes of the caller.
    pub async fn volumes(&self) -> Result<Vec<VolumeInfo>, Error> {
        self.json(self.get(routes::VOLUMES)).await
    }

    /// Creates an empty volume.
    pub async fn create_volume(&self, request: &CreateVolume) -> Result<VolumeInfo, Error> {
        self.json(self.post(routes::VOLUMES, request)).await
    }

    /// Creates a volume from an ext4 image.
    pub async fn import_volume(
        &self,
        name: &str,
        image: impl Stream<Item = io::Result<Vec<u8>>> + Send + 'static,
    ) -> Result<VolumeInfo, Error> {
        let request = self
            .request(Method::POST, &fill(routes::VOLUME_IMAGE, &[name]))
            .header("content-type", "application/octet-stream")
            .body(Body::wrap_stream(image));
        self.json(request).await
    }

    /// Describes one volume.
    pub async fn volume(&self, name: &str) -> Result<VolumeInfo, Error> {
        self.json(self.get(&fill(routes::VOLUME, &[name]))).await
    }

    /// Deletes a volume that no sandbox writes.
    pub async fn delete_volume(&self, name: &str) -> Result<(), Error> {
        self.nothing(self.request(Method::DELETE, &fill(routes::VOLUME, &[name])))
            .await
    }

    /// Makes what a sandbox has in a volume the content of that volume.
    pub async fn commit_volume(&self, sandbox: &str, name: &str) -> Result<VolumeInfo, Error> {
        let path = fill(routes::VOLUME_COMMIT, &[sandbox, name]);
        self.json(self.request(Method::POST, &path)).await
    }
}
