//! Requests that pack snapshots and unpack artifacts.

use bytes::Bytes;
use forkd_api::routes::{self, fill, push_escaped};
use forkd_api::{MemoryWish, SnapshotInfo, UnpackPlan};
use futures::{Stream, StreamExt, TryStream};
use reqwest::{Body, Method};

use crate::{Client, Error};

const BYTES: (&str, &str) = ("content-type", "application/octet-stream");

fn unpack_path(route: &str, tag: Option<&str>, memory: MemoryWish) -> String {
    let memory = match memory {
        MemoryWish::Auto => "auto",
        MemoryWish::Require => "require",
        MemoryWish::Never => "never",
    };
    let mut path = format!("{route}?memory={memory}");
    if let Some(tag) = tag {
        path.push_str("&tag=");
        push_escaped(&mut path, tag);
    }
    path
}

impl Client {
    /// Packs a snapshot as a tar stream. `base` holds the documents of an artifact whose packs are not sent again. The
    /// number is the length of the stream, if the daemon names it.
    pub async fn pack(
        &self,
        tag: &str,
        allow_secrets: bool,
        description: Option<&str>,
        base: Vec<u8>,
    ) -> Result<
        (
            Option<u64>,
            impl Stream<Item = Result<Bytes, Error>> + use<>,
        ),
        Error,
    > {
        let mut path = fill(routes::SNAPSHOT_PACK, &[tag]);
        path.push_str(&format!("?allow_secrets={allow_secrets}"));
        if let Some(text) = description {
            path.push_str("&description=");
            push_escaped(&mut path, text);
        }
        let request = self.request(Method::POST, &path);
        let request = request.header(BYTES.0, BYTES.1).body(base);
        let response = self.send(request).await?;
        let length = response.content_length();
        let content = response
            .bytes_stream()
            .map(|chunk| chunk.map_err(|error| Error::CutOff(Error::root(error))));
        Ok((length, content))
    }

    /// Asks how an artifact would be unpacked. `documents` is its stream without packs.
    pub async fn check_artifact(
        &self,
        tag: Option<&str>,
        memory: MemoryWish,
        documents: Vec<u8>,
    ) -> Result<UnpackPlan, Error> {
        let path = unpack_path(routes::HUB_CHECK, tag, memory);
        let request = self.request(Method::POST, &path);
        self.json(request.header(BYTES.0, BYTES.1).body(documents))
            .await
    }

    /// Unpacks an artifact from its stream.
    pub async fn unpack<S>(
        &self,
        tag: Option<&str>,
        memory: MemoryWish,
        content: S,
    ) -> Result<SnapshotInfo, Error>
    where
        S: TryStream + Send + 'static,
        S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
        Bytes: From<S::Ok>,
    {
        let path = unpack_path(routes::HUB_UNPACK, tag, memory);
        let request = self.request(Method::POST, &path);
        let content = Body::wrap_stream(content);
        self.json(request.header(BYTES.0, BYTES.1).body(content))
            .await
    }
}
