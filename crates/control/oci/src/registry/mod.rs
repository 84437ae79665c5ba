//! Pulls images from registries: `GET /v2/<repository>/manifests/<tag or digest>` and `…/blobs/<digest>`.
//!
//! ```text
//! name → endpoints (mirrors, registry) → index → manifest → configuration, layers in parallel → Image
//! ```
//!
//! Index, manifest and configuration go through the same parsers as those of a layout. All bytes are bounded and
//! checked against the digests that name them before anything else looks at them. Only the document behind a tag has no
//! digest yet: its own digest names the image from then on.

mod blobs;
mod challenge;
mod error;
mod repository;
mod session;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

pub use blobs::{BlobSource, Blobs, Wanted, Watch};
pub use error::RegistryError;
pub use repository::Repository;

use parking_lot::Mutex;
use session::Session;

use crate::auth::{self, Credential, Helpers};
use crate::config::Config;
use crate::digest::Digest;
use crate::error::OciError;
use crate::http::bounded;
use crate::image::Image;
use crate::layout::resolve;
use crate::limits;
use crate::manifest::{ACCEPTED, Descriptor, Document, Manifest, Platform};
use crate::name::ImageName;
use crate::part::Part;
use crate::registries::{Endpoint, Registries};

/// A request: the image, the places that may have it, and the rights to read it.
#[derive(Debug)]
pub struct Pull<'a> {
    pub name: &'a ImageName,
    pub platform: &'a Platform,
    pub registries: &'a Registries,
    /// For the registry of the name. Mirrors have their own, in the files.
    pub credential: Option<Credential>,
    /// Files of credentials, in order.
    pub auth_files: Vec<PathBuf>,
    pub helpers: Helpers,
}

/// How far a pull has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The manifest was found: so many layers, so many bytes.
    Found {
        digest: Digest,
        layers: usize,
        bytes: u64,
    },
    /// Bytes of layers that are on this host by now.
    Fetched { bytes: u64, of: u64 },
}

/// Pulls an image. Its layers are blobs in the folder.
pub fn pull(
    pull: &Pull<'_>,
    blobs: &Blobs,
    told: &mut dyn FnMut(Progress),
) -> Result<Image, RegistryError> {
    let places = pull.sessions()?;
    let mut failures = Vec::new();
    for at in 0..places.len() {
        // Later places are asked for blobs that the first one lacks.
        let places = places.get(at..).unwrap_or_default();
        let Some(place) = places.first() else {
            continue;
        };
        match find(place, pull.name, pull.platform) {
            Ok((digest, manifest)) => return fetch(places, digest, &manifest, blobs, told),
            // The image is there, and this is not about the place.
            Err(error @ RegistryError::Image(OciError::NoPlatform { .. })) => return Err(error),
            Err(error) => failures.push((place.host().to_owned(), error)),
        }
    }
    Err(one_of(failures, &pull.name.to_string()))
}

impl Pull<'_> {
    fn sessions(&self) -> Result<Vec<Session>, RegistryError> {
        let endpoints = self.registries.endpoints(self.name)?;
        let last = endpoints.len().saturating_sub(1);
        let with_credential = endpoints.into_iter().enumerate().map(|(at, endpoint)| {
            let given = self.credential.clone().filter(|_| at == last);
            let credential = match given {
                Some(given) => Some(given),
                None => self.stored(&endpoint)?,
            };
            Session::new(endpoint, credential)
        });
        with_credential.collect()
    }

    fn stored(&self, endpoint: &Endpoint) -> Result<Option<Credential>, RegistryError> {
        let (host, repository) = (&endpoint.host, &endpoint.repository);
        Ok(auth::find(
            &self.auth_files,
            host,
            repository,
            self.helpers,
        )?)
    }
}

/// The only failure, or all of them with the places they come from.
fn one_of(mut failures: Vec<(String, RegistryError)>, name: &str) -> RegistryError {
    match (failures.pop(), failures.is_empty()) {
        (Some((_, error)), true) => error,
        (last, _) => {
            failures.extend(last);
            RegistryError::Nowhere {
                name: name.to_owned(),
                tried: failures,
            }
        }
    }
}

/// Finds the manifest for a platform.
fn find(
    place: &Session,
    name: &ImageName,
    wanted: &Platform,
) -> Result<(Digest, Manifest), RegistryError> {
    let what = format!("the image {name}");
    let asked = match name.digest {
        Some(digest) => digest.to_string(),
        None => name.tag_or_latest().to_owned(),
    };
    let answer = place.get(&format!("manifests/{asked}"), &what, ACCEPTED, 0)?;
    let promised = answer
        .headers()
        .get("docker-content-digest")
        .and_then(|value| value.to_str().ok()?.parse::<Digest>().ok());
    let bytes = bounded(answer, &what, limits::MANIFEST)?;
    let digest = Digest::of(&bytes);
    if let Some(promised) = name.digest.or(promised) {
        promised.check(&what, digest)?;
    }
    match Document::parse(&bytes, &what)? {
        Document::Manifest(manifest) => Ok((digest, manifest)),
        Document::Index(index) => resolve(index, wanted, |digest, what| {
            let answer = place.get(&format!("manifests/{digest}"), what, ACCEPTED, 0)?;
            let bytes = bounded(answer, what, limits::MANIFEST)?;
            digest.check(what, Digest::of(&bytes))?;
            Ok::<_, RegistryError>(bytes)
        }),
    }
}

fn fetch(
    places: &[Session],
    digest: Digest,
    manifest: &Manifest,
    blobs: &Blobs,
    told: &mut dyn FnMut(Progress),
) -> Result<Image, RegistryError> {
    let config = configuration(places, &manifest.config)?;
    let wanted = wanted(&manifest.layers)?;
    let unique: BTreeMap<Digest, &Wanted> = wanted.iter().map(|one| (one.digest, one)).collect();
    let unique: Vec<&Wanted> = unique.into_values().collect();
    let bytes: u64 = unique.iter().map(|one| one.size).sum();
    told(Progress::Found {
        digest,
        layers: manifest.layers.len(),
        bytes,
    });
    let parts = layers(places, &unique, blobs, &mut |fetched| {
        told(Progress::Fetched {
            bytes: fetched.min(bytes),
            of: bytes,
        });
    })?;
    let parts: Vec<Part> = wanted
        .iter()
        .filter_map(|one| parts.get(&one.digest).cloned())
        .collect();
    Ok(Image::new(digest, Config::parse(&config)?, parts)?)
}

fn configuration(places: &[Session], config: &Descriptor) -> Result<Vec<u8>, RegistryError> {
    let what = format!("the configuration {}", config.digest);
    let mut failures = Vec::new();
    for place in places {
        let got = place
            .get(&format!("blobs/{}", config.digest), &what, "*/*", 0)
            .and_then(|answer| bounded(answer, &what, limits::CONFIG))
            .and_then(|bytes| {
                config.digest.check(&what, Digest::of(&bytes))?;
                Ok(bytes)
            });
        match got {
            Ok(bytes) => return Ok(bytes),
            Err(error) => failures.push((place.host().to_owned(), error)),
        }
    }
    Err(one_of(failures, &what))
}

/// Every layer with its size. Together they may not be larger than an image unpacked.
fn wanted(layers: &[Descriptor]) -> Result<Vec<Wanted>, RegistryError> {
    let mut total: u64 = 0;
    let mut all = Vec::new();
    for (number, layer) in layers.iter().enumerate() {
        let what = format!("layer {} of {}", number + 1, layers.len());
        let Some(size) = layer.size else {
            return Err(RegistryError::NoSize { what });
        };
        total = total.saturating_add(size);
        if total > limits::UNPACKED {
            let found = total;
            return Err(RegistryError::Image(OciError::Limit {
                what: "the size of the layers".into(),
                found,
                limit: limits::UNPACKED,
            }));
        }
        all.push(Wanted {
            digest: layer.digest,
            size,
            what,
        });
    }
    Ok(all)
}

/// Fetches blobs, a few at the same time. The first failure stops the others.
fn layers(
    places: &[Session],
    wanted: &[&Wanted],
    blobs: &Blobs,
    told: &mut dyn FnMut(u64),
) -> Result<BTreeMap<Digest, Part>, RegistryError> {
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let done = Mutex::new((BTreeMap::new(), None));
    let (arrived, pieces) = mpsc::channel::<u64>();
    std::thread::scope(|scope| {
        for _ in 0..wanted.len().min(limits::AT_ONCE) {
            let arrived = arrived.clone();
            let (next, stop, done) = (&next, &stop, &done);
            scope.spawn(move || {
                let arrived = |bytes| {
                    // The receiver outlives all senders.
                    let _ = arrived.send(bytes);
                };
                let watch = Watch {
                    arrived: &arrived,
                    stop,
                };
                while let Some(one) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let got = blobs.get(places, one, &watch);
                    let mut done = done.lock();
                    match got {
                        Ok(part) => {
                            done.0.insert(one.digest, part);
                        }
                        Err(error) => {
                            stop.store(true, Ordering::Relaxed);
                            // The first failure is the reason; the others were stopped.
                            if !matches!(error, RegistryError::Stopped) {
                                done.1.get_or_insert(error);
                            }
                            return;
                        }
                    }
                }
            });
        }
        drop(arrived);
        let mut fetched = 0;
        for piece in pieces {
            fetched += piece;
            told(fetched);
        }
    });
    let (parts, failure) = done.into_inner();
    match failure {
        Some(error) => Err(error),
        None => Ok(parts),
    }
}
