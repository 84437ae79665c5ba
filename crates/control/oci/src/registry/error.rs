//! [`RegistryError`]: why an image or an artifact cannot be pulled or pushed. No text in it comes from a credential or from a URL's query.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use crate::auth::AuthError;
use crate::error::OciError;
use crate::registries::RegistriesError;

/// Why an image or an artifact cannot be pulled or pushed.
#[derive(Debug, Error)]
pub enum RegistryError {
    #[error("the registry is not known")]
    Registries(#[from] RegistriesError),
    #[error("the credentials cannot be used")]
    Auth(#[from] AuthError),
    #[error("what the registry sent cannot be used")]
    Image(#[from] OciError),
    #[error("cannot use the certificate {}", path.display())]
    Certificate {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the HTTP client cannot be set up")]
    Setup(#[source] reqwest::Error),
    #[error("{host} cannot be reached")]
    Unreachable {
        host: String,
        #[source]
        source: reqwest::Error,
    },
    #[error("{host} has no {what}")]
    NotFound { host: String, what: String },
    #[error("{host} refuses to give {what} {}", with(*credential))]
    Denied {
        host: String,
        what: String,
        /// Whether a credential was sent.
        credential: bool,
    },
    #[error("{host} answers with status {status}")]
    Status { host: String, status: u16 },
    /// The registry asks to come back later, or failed.
    #[error("{host} answers with status {status}, also after several attempts")]
    Busy {
        host: String,
        status: u16,
        after: Option<Duration>,
    },
    #[error("{host} asks for a login in a way that is not known: {problem}")]
    Challenge { host: String, problem: &'static str },
    #[error("{host} redirects more than {limit} times")]
    Redirects { host: String, limit: usize },
    #[error("{host} redirects to a place that may not be used: {problem}")]
    Redirect { host: String, problem: &'static str },
    #[error("{what} breaks off at {got} of {size} bytes")]
    Truncated {
        what: String,
        got: u64,
        size: u64,
        #[source]
        source: Option<io::Error>,
    },
    #[error("{what} has more than the {limit} bytes that are allowed or promised")]
    TooLong { what: String, limit: u64 },
    #[error("{what} arrives too slowly")]
    TooSlow { what: String },
    #[error("the manifest does not say the size of {what}")]
    NoSize { what: String },
    #[error("{host} does not answer an upload as a registry does: {problem}")]
    Upload { host: String, problem: &'static str },
    #[error("cannot read {what} from this host")]
    Content {
        what: String,
        #[source]
        source: io::Error,
    },
    #[error("another layer could not be fetched")]
    Stopped,
    #[error("no place has {name}: {}", listed(tried))]
    Nowhere {
        name: String,
        tried: Vec<(String, RegistryError)>,
    },
}

fn with(credential: bool) -> &'static str {
    if credential {
        "with this credential"
    } else {
        "without a credential"
    }
}

fn listed(tried: &[(String, RegistryError)]) -> String {
    let lines = tried.iter().map(|(host, error)| {
        let mut text = format!("{host}: {error}");
        let mut cause = std::error::Error::source(error);
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
        text
    });
    lines.collect::<Vec<_>>().join("; ")
}

impl RegistryError {
    /// Whether the same request may succeed a little later.
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Busy { .. } => true,
            Self::Unreachable { source, .. } => {
                source.is_connect() || source.is_timeout() || source.is_request()
            }
            _ => false,
        }
    }
}
