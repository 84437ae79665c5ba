//! Requests about images, and about operations that go on after their request.

use std::io;

use bytes::Bytes;
use forkd_api::routes::fill;
use forkd_api::{
    BuildEvent, FetchImage, ImageDetail, ImageInfo, OperationInfo, PrunedImages, routes,
};
use futures::{Stream, StreamExt};
use reqwest::{Body, Method};

use crate::{Client, Error, Frames};

impl Client {
    /// Lists installed images.
    pub async fn images(&self) -> Result<Vec<ImageInfo>, Error> {
        self.json(self.get(routes::IMAGES)).await
    }

    /// Describes an image.
    pub async fn image(&self, name: &str) -> Result<ImageDetail, Error> {
        self.json(self.get(&routes::IMAGE.replace("{name}", name)))
            .await
    }

    /// Starts to fetch an image from a registry.
    pub async fn fetch_image(&self, request: &FetchImage) -> Result<OperationInfo, Error> {
        self.json(self.request(Method::POST, routes::IMAGES).json(request))
            .await
    }

    /// Sends an archive. The image is being made when this returns.
    pub async fn send_image(
        &self,
        name: Option<&str>,
        disk_mib: Option<u32>,
        content: impl Stream<Item = io::Result<Vec<u8>>> + Send + 'static,
    ) -> Result<OperationInfo, Error> {
        let mut query = Vec::new();
        query.extend(name.map(|name| format!("name={name}")));
        query.extend(disk_mib.map(|mib| format!("disk_mib={mib}")));
        let path = format!("{}?{}", routes::IMAGES_ARCHIVE, query.join("&"));
        let request = self
            .request(Method::POST, &path)
            .header("content-type", "application/octet-stream")
            .body(Body::wrap_stream(content));
        self.json(request).await
    }

    /// Builds an image. The content is the archive that the API describes; dropping the answer cancels the build.
    pub async fn build_image(
        &self,
        content: impl Stream<Item = io::Result<Vec<u8>>> + Send + 'static,
    ) -> Result<Frames<BuildEvent>, Error> {
        let request = self
            .request(Method::POST, routes::BUILDS)
            .header("content-type", "application/octet-stream")
            .body(Body::wrap_stream(content));
        Ok(Frames::new(self.send(request).await?))
    }

    /// Sends an image as an OCI archive.
    pub async fn export_image(
        &self,
        name: &str,
    ) -> Result<impl Stream<Item = Result<Bytes, Error>> + use<>, Error> {
        let path = fill(routes::IMAGE_ARCHIVE, &[name]);
        let response = self.send(self.get(&path)).await?;
        Ok(response
            .bytes_stream()
            .map(|piece| piece.map_err(|error| Error::CutOff(Error::root(error)))))
    }

    /// Removes an image.
    pub async fn delete_image(&self, name: &str) -> Result<(), Error> {
        let path = routes::IMAGE.replace("{name}", name);
        self.send(self.request(Method::DELETE, &path))
            .await
            .map(drop)
    }

    /// Removes fetched images that no snapshot was booted from.
    pub async fn prune_images(&self) -> Result<PrunedImages, Error> {
        self.json(self.request(Method::POST, routes::IMAGES_PRUNE))
            .await
    }

    /// Describes an operation, when it has ended or after these seconds.
    pub async fn operation(&self, id: &str, wait_secs: u64) -> Result<OperationInfo, Error> {
        let path = routes::OPERATION.replace("{operation}", id);
        self.json(self.get(&format!("{path}?wait_secs={wait_secs}")))
            .await
    }

    /// Ends an operation early.
    pub async fn cancel_operation(&self, id: &str) -> Result<(), Error> {
        let path = routes::OPERATION.replace("{operation}", id);
        self.send(self.request(Method::DELETE, &path))
            .await
            .map(drop)
    }
}
