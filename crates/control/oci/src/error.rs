//! [`OciError`]: why an image cannot be used.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::digest::Digest;

/// Why an image cannot be used.
#[derive(Debug, Error)]
pub enum OciError {
    #[error("cannot {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A file that an image must have is missing.
    #[error("{} has no {name}: it is not {kind}", path.display())]
    NotAnImage {
        path: PathBuf,
        name: &'static str,
        kind: &'static str,
    },
    #[error("{what} does not parse")]
    Syntax {
        what: String,
        #[source]
        source: serde_json::Error,
    },
    #[error("{what} has {found}, and at most {limit} is allowed")]
    Limit {
        what: String,
        found: u64,
        limit: u64,
    },
    #[error("{what} should have the digest {expected}, but its bytes have {found}")]
    Digest {
        what: String,
        expected: Digest,
        found: Digest,
    },
    #[error("the blob {digest} is missing")]
    NoBlob { digest: Digest },
    #[error("there is no image {name:?}; there is: {}", listed(there))]
    NoName { name: String, there: Vec<String> },
    #[error(
        "there are several images, and none was named; there is: {}",
        listed(there)
    )]
    Several { there: Vec<String> },
    #[error("the image is not for {wanted}; it is for: {}", listed(there))]
    NoPlatform { wanted: String, there: Vec<String> },
    #[error("{what} has the kind {found:?}, which is not known")]
    Kind { what: String, found: String },
    #[error("the configuration names {configured} layers, and the manifest has {found}")]
    LayerCount { configured: usize, found: usize },
    #[error("{what} cannot be unpacked")]
    Unpack {
        what: String,
        #[source]
        source: io::Error,
    },
    #[error("the registry gave no image")]
    Registry(#[source] Box<crate::registry::RegistryError>),
    #[error("{engine} cannot be asked at {}", socket.display())]
    Engine {
        engine: &'static str,
        socket: PathBuf,
        #[source]
        source: reqwest::Error,
    },
    #[error("{engine} has no image {name:?} (status {status})")]
    EngineImage {
        engine: &'static str,
        name: String,
        status: u16,
    },
    #[error("the configuration of the image has a bad {field}: {problem}")]
    Config {
        field: &'static str,
        problem: String,
    },
}

fn listed(names: &[String]) -> String {
    if names.is_empty() {
        return "nothing".into();
    }
    let mut text = names
        .iter()
        .take(20)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    if names.len() > 20 {
        text.push_str(", …");
    }
    text
}

impl OciError {
    pub(crate) fn io(
        action: &'static str,
        path: &std::path::Path,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}
