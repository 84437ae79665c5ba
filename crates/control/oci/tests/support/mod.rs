//! An example image, a server that answers as a test says, and pulls into a folder.

// Each test program uses its own part of it.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use forkd_oci::Image;
use forkd_oci::auth::{Credential, Helpers};
use forkd_oci::digest::Digest;
use forkd_oci::manifest::Platform;
use forkd_oci::registries::Registries;
use forkd_oci::registry::{self, Blobs, Pull, RegistryError};
use serde_json::json;

pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// A request as it arrived.
#[derive(Debug, Clone)]
pub struct Request {
    pub path: String,
    pub headers: BTreeMap<String, String>,
}

/// The body of an answer.
pub enum Body {
    Whole(Vec<u8>),
    /// Breaks off after this many bytes of the whole.
    Cut(Vec<u8>, usize),
    /// Spaces without an end.
    Endless,
}

pub struct Answer {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Body,
}

impl Answer {
    pub fn ok(body: impl Into<Vec<u8>>) -> Self {
        Self {
            status: 200,
            headers: Vec::new(),
            body: Body::Whole(body.into()),
        }
    }

    pub fn status(status: u16) -> Self {
        Self {
            status,
            ..Self::ok("")
        }
    }

    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }
}

type Script = dyn Fn(&Request) -> Answer + Send + Sync;

/// A server on loopback. It answers until the test process ends.
pub struct Server {
    pub host: String,
    seen: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    pub fn start(script: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let script: Arc<Script> = Arc::new(script);
        let log = seen.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (script, log) = (script.clone(), log.clone());
                std::thread::spawn(move || {
                    // A client that hangs up in the middle is part of some tests.
                    let _ = serve(stream?, &*script, &log);
                    Ok::<_, std::io::Error>(())
                });
            }
        });
        Self { host, seen }
    }

    pub fn seen(&self) -> Vec<Request> {
        self.seen.lock().unwrap().clone()
    }

    /// Number of requests whose path has this in it.
    pub fn count(&self, part: &str) -> usize {
        let seen = self.seen();
        seen.iter().filter(|one| one.path.contains(part)).count()
    }
}

fn serve(stream: TcpStream, script: &Script, log: &Mutex<Vec<Request>>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        match line.trim_end().split_once(": ") {
            Some((name, value)) => headers.insert(name.to_lowercase(), value.to_owned()),
            None => break,
        };
    }
    let request = Request { path, headers };
    log.lock().unwrap().push(request.clone());
    let answer = script(&request);
    let mut out = &stream;
    write!(out, "HTTP/1.1 {} x\r\nconnection: close\r\n", answer.status)?;
    for (name, value) in &answer.headers {
        write!(out, "{name}: {value}\r\n")?;
    }
    match answer.body {
        Body::Whole(bytes) => {
            write!(out, "content-length: {}\r\n\r\n", bytes.len())?;
            out.write_all(&bytes)
        }
        Body::Cut(bytes, at) => {
            write!(out, "content-length: {}\r\n\r\n", bytes.len())?;
            out.write_all(&bytes[..at])
        }
        Body::Endless => {
            write!(out, "\r\n")?;
            let piece = [b' '; 64 << 10];
            loop {
                out.write_all(&piece)?;
            }
        }
    }
}

/// A small image: two layers, of which the second is there twice, and an index for two machines.
pub struct Example {
    pub config: Vec<u8>,
    pub layers: Vec<Vec<u8>>,
    pub manifest: Vec<u8>,
    pub index: Vec<u8>,
}

impl Example {
    pub fn new() -> Self {
        let first: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
        let layers = vec![first, b"second".to_vec(), b"second".to_vec()];
        let diff_ids: Vec<_> = layers.iter().map(|layer| Digest::of(layer)).collect();
        let config = json!({"rootfs": {"type": "layers", "diff_ids": diff_ids}}).to_string();
        let named = |kind: &str, bytes: &[u8]| json!({"mediaType": kind, "digest": Digest::of(bytes), "size": bytes.len()});
        let blobs: Vec<_> = layers
            .iter()
            .map(|layer| named("application/vnd.oci.image.layer.v1.tar", layer))
            .collect();
        let manifest = json!({
            "schemaVersion": 2, "mediaType": OCI_MANIFEST,
            "config": named("application/vnd.oci.image.config.v1+json", config.as_bytes()), "layers": blobs,
        })
        .to_string();
        let platform = |architecture: &str, bytes: &[u8]| {
            let mut entry = named(OCI_MANIFEST, bytes);
            entry["platform"] = json!({"os": "linux", "architecture": architecture});
            entry
        };
        // The other one does not exist; a registry would refuse an index with it, so it is the same document.
        let entries = [
            platform("arm64", manifest.as_bytes()),
            platform("amd64", manifest.as_bytes()),
        ];
        let index =
            json!({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}).to_string();
        Self {
            config: config.into_bytes(),
            layers,
            manifest: manifest.into_bytes(),
            index: index.into_bytes(),
        }
    }

    /// The answer of an honest registry.
    pub fn answer(&self, request: &Request) -> Answer {
        let last = request.path.rsplit('/').next().unwrap_or_default();
        if last == "1" {
            return Answer::ok(self.index.clone()).with("content-type", OCI_INDEX);
        }
        let all = [&self.index, &self.manifest, &self.config];
        let mut all = all.into_iter().chain(&self.layers);
        let Some(bytes) = all.find(|bytes| Digest::of(bytes).to_string() == last) else {
            return Answer::status(404);
        };
        let range = request.headers.get("range");
        let from = range.and_then(|text| {
            text.strip_prefix("bytes=")?
                .strip_suffix('-')?
                .parse::<usize>()
                .ok()
        });
        match from {
            None => Answer::ok(bytes.clone()),
            Some(from) => Answer {
                status: 206,
                ..Answer::ok(&bytes[from..])
            }
            .with(
                "content-range",
                format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len()),
            ),
        }
    }
}

/// Pulls `NAME` with a configuration.
pub fn pull_with(
    name: &str,
    registries: &Registries,
    credential: Option<Credential>,
    folder: &Path,
) -> Result<Image, RegistryError> {
    let name = name.parse().unwrap();
    let pull = Pull {
        name: &name,
        platform: &Platform::host(),
        registries,
        credential,
        auth_files: Vec::new(),
        helpers: Helpers::Ignore,
    };
    registry::pull(&pull, &Blobs::at(folder.to_owned())?, &mut |_| {})
}

/// Pulls `NAME` without a configuration.
pub fn pull(name: &str, folder: &Path) -> Result<Image, RegistryError> {
    pull_with(name, &Registries::default(), None, folder)
}

/// A configuration in a file.
pub fn registries(text: &str) -> Registries {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("schema = 1\n{text}")).unwrap();
    Registries::read(Some(file.path())).unwrap()
}

/// Names of the files in a folder.
pub fn files(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
