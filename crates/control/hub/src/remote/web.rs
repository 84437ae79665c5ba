//! A layout that a web server shows as files. It is read only.

use std::io::Read;

use forkd_oci::digest::Digest;
use forkd_oci::http;
use forkd_oci::registry::{BlobSource, RegistryError};
use parking_lot::Mutex;
use reqwest::Url;
use reqwest::blocking::{Client, Response};

use super::{Cache, host_of, is_plain, name_path};
use crate::archive::{INDEX_FILE, blob_path};
use crate::error::HubError;
use crate::layout::{Place, signatures_in};
use crate::limits;
use crate::manifest::{Artifact, Descriptor, Index, parse};

/// A folder on a web server.
#[derive(Debug)]
pub struct WebFolder {
    base: Url,
    host: String,
    http: Client,
    cache: Cache,
    /// The list that the name was found in; signatures stand beside it.
    list: Mutex<Index>,
}

impl WebFolder {
    /// Nothing is asked yet. The URL is that of the folder.
    pub fn open(url: &str, cache: Cache) -> Result<Self, HubError> {
        let wrong = || HubError::invalid("the address is not a URL of http or https");
        let mut base = Url::parse(url).map_err(|_| wrong())?;
        if !matches!(base.scheme(), "http" | "https") || base.query().is_some() {
            return Err(wrong());
        }
        if !base.path().ends_with('/') {
            base.set_path(&format!("{}/", base.path()));
        }
        let host = host_of(&base).ok_or_else(wrong)?;
        let http = http::client(&base, &host, None)?;
        Ok(Self {
            base,
            host,
            http,
            cache,
            list: Mutex::default(),
        })
    }

    fn get(&self, path: &str, what: &str, from: u64) -> Result<Response, RegistryError> {
        http::patiently(|| {
            let url = http::redirect(&self.base, Some(path), &self.host)?;
            let answer = http::follow(url, &self.host, from, |url| self.http.get(url))?;
            http::judged(answer, &self.host, what, false)
        })
    }

    fn document(&self, path: &str, what: &str, limit: u64) -> Result<Vec<u8>, RegistryError> {
        http::bounded(self.get(path, what, 0)?, what, limit)
    }
}

impl BlobSource for WebFolder {
    fn host(&self) -> &str {
        &self.host
    }

    fn blob(&self, digest: Digest, what: &str, from: u64) -> Result<Response, RegistryError> {
        self.get(&blob_path(&digest), what, from)
    }
}

impl Place for WebFolder {
    fn describe(&self) -> String {
        format!("{}{}", self.host, self.base.path())
    }

    fn index(&self, name: Option<&str>) -> Result<Index, HubError> {
        // A folder that an object store shows has one list for each name.
        let own = name.filter(|name| is_plain(name)).map(name_path);
        let own = own.map(|path| self.document(&path, "list of the name", limits::MANIFEST));
        let bytes = match own {
            Some(Ok(bytes)) => bytes,
            None | Some(Err(RegistryError::NotFound { .. } | RegistryError::Denied { .. })) => {
                self.document(INDEX_FILE, "index of a layout", limits::MANIFEST)?
            }
            Some(Err(error)) => return Err(error.into()),
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
