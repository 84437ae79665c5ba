//! An object store as a place for artifacts: the layout of a folder below a prefix, and one list for each name.
//!
//! ```text
//!   PREFIX/oci-layout   PREFIX/blobs/sha256/HEX   PREFIX/refs/NAME.json
//! ```
//!
//! A list for each name, because object stores have no rename: two pushes of different names never write one object.

use std::io::Read;
use std::time::SystemTime;

use forkd_oci::auth::Secret;
use forkd_oci::digest::Digest;
use forkd_oci::http;
use forkd_oci::registry::{BlobSource, RegistryError};
use parking_lot::Mutex;
use reqwest::blocking::{Body, Client, Response};
use reqwest::header::{AUTHORIZATION, CONTENT_LENGTH, HOST, RANGE};
use reqwest::{Method, Url};

use super::sigv4::{Request, escape};
use super::{Cache, host_of, is_plain, name_path};
use crate::archive::{LAYOUT, LAYOUT_FILE, blob_path, layout_index};
use crate::documents::Documents;
use crate::error::HubError;
use crate::layout::{Content, Place, Shelf, signatures_in};
use crate::limits;
use crate::manifest::{Artifact, Descriptor, Index, parse, to_bytes};

/// The rights of a user, and the store that has given them.
#[derive(Debug, Clone)]
pub struct Keys {
    /// Scheme, host and port; the bucket is the first part of the path.
    pub endpoint: String,
    pub region: String,
    pub id: String,
    pub secret: Secret,
    pub token: Option<Secret>,
}

/// A prefix in a bucket.
#[derive(Debug)]
pub struct Bucket {
    base: Url,
    host: String,
    /// Bucket and prefix, without slashes at the ends.
    folder: String,
    keys: Keys,
    http: Client,
    cache: Cache,
    /// The list that the name was found in; signatures stand beside it.
    list: Mutex<Index>,
}

impl Bucket {
    /// Nothing is asked yet. `folder` is `BUCKET[/PREFIX]`.
    pub fn open(folder: &str, keys: Keys, cache: Cache) -> Result<Self, HubError> {
        let wrong = || HubError::invalid("the address of the object store is not a URL");
        let base = Url::parse(&keys.endpoint).map_err(|_| wrong())?;
        let host = host_of(&base).ok_or_else(wrong)?;
        let folder = folder.trim_matches('/');
        let parts = || folder.split('/');
        if folder.is_empty() || parts().any(|part| part.is_empty() || part.starts_with('.')) {
            return Err(HubError::invalid(
                "the bucket is malformed: write s3://BUCKET/PREFIX:NAME",
            ));
        }
        Ok(Self {
            http: http::client(&base, &host, None)?,
            folder: folder.to_owned(),
            base,
            host,
            keys,
            cache,
            list: Mutex::default(),
        })
    }

    /// Sends a signed request. The body is opened again for each attempt.
    fn send(
        &self,
        method: &Method,
        key: &str,
        what: &str,
        from: u64,
        body: Option<(&Digest, u64, Content<'_>)>,
    ) -> Result<Response, RegistryError> {
        let path = escape(&format!("/{}/{key}", self.folder));
        let url = http::redirect(&self.base, Some(&path), &self.host)?;
        let empty = Digest::of(b"");
        http::patiently(|| {
            let payload = body.map_or(&empty, |(digest, _, _)| digest);
            let time = timestamp(SystemTime::now());
            let signed = Request {
                method: method.as_str(),
                host: &self.host,
                path: &path,
                payload,
                time: &time,
                region: &self.keys.region,
                id: &self.keys.id,
                secret: &self.keys.secret,
                token: self.keys.token.as_ref(),
            };
            let mut request = self
                .http
                .request(method.clone(), url.clone())
                .header(HOST, &self.host)
                .header("x-amz-date", &time)
                .header("x-amz-content-sha256", payload.hex())
                .header(AUTHORIZATION, signed.authorization());
            if let Some(token) = &self.keys.token {
                request = request.header("x-amz-security-token", token.reveal());
            }
            if from > 0 {
                request = request.header(RANGE, format!("bytes={from}-"));
            }
            if let Some((_, size, content)) = body {
                let content = content().map_err(|source| RegistryError::Content {
                    what: what.to_owned(),
                    source,
                })?;
                request = request
                    .timeout(http::upload_time(size))
                    .body(Body::sized(content, size));
            }
            let answer = request.send();
            let answer = answer.map_err(|error| http::unreachable(&self.host, error))?;
            http::judged(answer, &self.host, what, true)
        })
    }

    fn document(&self, key: &str, what: &str, limit: u64) -> Result<Vec<u8>, RegistryError> {
        http::bounded(self.send(&Method::GET, key, what, 0, None)?, what, limit)
    }

    fn write(&self, key: &str, bytes: &[u8]) -> Result<(), RegistryError> {
        let whole = bytes.to_vec();
        let content = || Ok(Box::new(std::io::Cursor::new(whole.clone())) as Box<dyn Read + Send>);
        let body = (
            &Digest::of(bytes),
            bytes.len() as u64,
            &content as Content<'_>,
        );
        self.send(&Method::PUT, key, key, 0, Some(body)).map(drop)
    }
}

/// A time in the form `20130524T000000Z`.
fn timestamp(now: SystemTime) -> String {
    let text = humantime::format_rfc3339_seconds(now).to_string();
    text.chars().filter(|c| !matches!(c, '-' | ':')).collect()
}

impl BlobSource for Bucket {
    fn host(&self) -> &str {
        &self.host
    }

    fn blob(&self, digest: Digest, what: &str, from: u64) -> Result<Response, RegistryError> {
        self.send(&Method::GET, &blob_path(&digest), what, from, None)
    }
}

impl Place for Bucket {
    fn describe(&self) -> String {
        format!("s3://{}", self.folder)
    }

    fn index(&self, name: Option<&str>) -> Result<Index, HubError> {
        let no_name = || HubError::NoName {
            name: name.unwrap_or_default().to_owned(),
            place: self.describe(),
            there: "unknown: name one as s3://BUCKET/PREFIX:NAME".into(),
        };
        let path = name.filter(|name| is_plain(name)).map(name_path);
        let path = path.ok_or_else(no_name)?;
        let bytes = match self.document(&path, "list of the name", limits::MANIFEST) {
            Err(RegistryError::NotFound { .. }) => return Err(no_name()),
            other => other?,
        };
        let index: Index = parse(&bytes, "the index of the layout")?;
        *self.list.lock() = index.clone();
        Ok(index)
    }

    fn referrers(&self, _: &Artifact) -> Result<Vec<Descriptor>, HubError> {
        let list = self.list.lock();
        Ok(signatures_in(&list))
    }

    fn small(&self, blob: &Descriptor, limit: u64) -> Result<Vec<u8>, HubError> {
        let what = format!("blob {}", blob.digest);
        Ok(self.document(&blob_path(&blob.digest), &what, limit)?)
    }

    fn pack(&self, pack: &Descriptor) -> Result<Box<dyn Read + Send>, HubError> {
        self.cache.fetch_from(self, pack)
    }

    fn arrived(&self, packs: &[Descriptor]) {
        self.cache.forget(packs);
    }
}

impl Shelf for Bucket {
    fn has(&self, blob: &Descriptor) -> Result<bool, HubError> {
        let key = blob_path(&blob.digest);
        match self.send(&Method::HEAD, &key, "the blob", 0, None) {
            Ok(answer) => {
                let length = answer.headers().get(CONTENT_LENGTH);
                let length = length.and_then(|text| text.to_str().ok()?.parse::<u64>().ok());
                Ok(length == Some(blob.size))
            }
            // Without the right to list, a store denies objects that do not exist. A write then tells.
            Err(RegistryError::NotFound { .. } | RegistryError::Denied { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn put(&self, blob: &Descriptor, content: Content<'_>) -> Result<u64, HubError> {
        let what = format!("the blob {}", blob.digest);
        let content = || self.cache.stoppable(content);
        let body = (&blob.digest, blob.size, &content as Content<'_>);
        let key = blob_path(&blob.digest);
        self.send(&Method::PUT, &key, &what, 0, Some(body))?;
        Ok(blob.size)
    }

    fn publish(&self, name: &str, documents: &Documents) -> Result<(), HubError> {
        if !is_plain(name) {
            return Err(HubError::invalid(format!(
                "{name:?} cannot be the name of an object: use letters, digits, dots, hyphens and underscores"
            )));
        }
        self.write(LAYOUT_FILE, LAYOUT)?;
        let list = to_bytes(&layout_index(documents, name));
        Ok(self.write(&name_path(name), &list)?)
    }
}
