//! HTTP for the clients of strangers' servers: one way to build a client, to retry, and to read an answer.
//!
//! Every answer has a bound, no answer is followed to another origin by itself, and no error quotes a URL: the query of
//! a URL may hold a signature.

use std::io::Read;
use std::path::Path;
use std::time::Duration;

use reqwest::blocking::{Client, RequestBuilder, Response};
use reqwest::header::{LOCATION, RANGE, RETRY_AFTER};
use reqwest::{Certificate, Url};

use crate::limits;
use crate::registries::is_loopback;
use crate::registry::RegistryError;

const CONNECT: Duration = Duration::from_secs(10);
/// The longest silence within an answer.
const SILENCE: Duration = Duration::from_secs(30);
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Every upload gets this long, whatever its size.
const GRACE: Duration = Duration::from_secs(60);

/// A client for one server. `host` is host and port, `ca` a certificate that is trusted besides those of the host.
pub fn client(base: &Url, host: &str, ca: Option<&Path>) -> Result<Client, RegistryError> {
    // Fails if another part of the process has installed a provider, which is fine.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let mut builder = Client::builder()
        .connect_timeout(CONNECT)
        .timeout(SILENCE)
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .user_agent(concat!("forkd/", env!("CARGO_PKG_VERSION")));
    if is_loopback(host) {
        builder = builder.no_proxy();
    }
    if let Some(path) = ca {
        let failed = |source| RegistryError::Certificate {
            path: path.to_owned(),
            source,
        };
        let pem = std::fs::read(path).map_err(failed)?;
        let trusted = Certificate::from_pem_bundle(&pem)
            .map_err(|error| failed(std::io::Error::other(error)))?;
        builder = builder.tls_certs_merge(trusted);
    } else if base.scheme() == "http" {
        // Without TLS no root certificates are needed: a minimal Debian has none.
        builder = builder.tls_certs_only([]);
    }
    builder.build().map_err(RegistryError::Setup)
}

/// How long an upload of this many bytes may take.
pub fn upload_time(bytes: u64) -> Duration {
    GRACE + Duration::from_secs(bytes / limits::SLOWEST)
}

/// Repeats a request whose failure may pass, with growing pauses.
pub fn patiently<T>(
    mut request: impl FnMut() -> Result<T, RegistryError>,
) -> Result<T, RegistryError> {
    let mut pause = FIRST_PAUSE;
    let mut attempt = 1;
    loop {
        let error = match request() {
            Err(error) if error.is_temporary() && attempt < limits::ATTEMPTS => error,
            other => return other,
        };
        let asked = match error {
            RegistryError::Busy { after, .. } => after,
            _ => None,
        };
        std::thread::sleep(asked.unwrap_or(pause).min(LONGEST_PAUSE));
        pause *= 2;
        attempt += 1;
    }
}

/// An answer with a good status, or the error that its status means. `credential` says whether one was sent.
pub fn judged(
    response: Response,
    host: &str,
    what: &str,
    credential: bool,
) -> Result<Response, RegistryError> {
    let status = response.status().as_u16();
    let host = host.to_owned();
    match status {
        200..=299 => Ok(response),
        401 | 403 => Err(RegistryError::Denied {
            host,
            what: what.to_owned(),
            credential,
        }),
        404 => Err(RegistryError::NotFound {
            host,
            what: what.to_owned(),
        }),
        429 | 500..=599 => Err(RegistryError::Busy {
            host,
            status,
            after: retry_after(&response),
        }),
        status => Err(RegistryError::Status { host, status }),
    }
}

/// The pause that a server asks for.
pub fn retry_after(response: &Response) -> Option<Duration> {
    let text = response.headers().get(RETRY_AFTER)?.to_str().ok()?;
    text.parse().ok().map(Duration::from_secs)
}

/// A server that was not reached. The URL is left out: that of a content server may have a signature in it.
pub fn unreachable(host: &str, source: reqwest::Error) -> RegistryError {
    RegistryError::Unreachable {
        host: host.to_owned(),
        source: source.without_url(),
    }
}

/// The target of a redirect, if it may be followed: never from https to http.
pub fn redirect(from: &Url, target: Option<&str>, host: &str) -> Result<Url, RegistryError> {
    let wrong = |problem| RegistryError::Redirect {
        host: host.to_owned(),
        problem,
    };
    let target = target.and_then(|to| from.join(to).ok());
    let target = target.ok_or_else(|| wrong("it is not a URL"))?;
    match (from.scheme(), target.scheme()) {
        (_, "https") | ("http", "http") => Ok(target),
        ("https", "http") => Err(wrong("it leads from https to http")),
        _ => Err(wrong("it is neither http nor https")),
    }
}

/// Sends a GET request and follows redirects, at most [`limits::REDIRECTS`]. `request` builds the request for each URL:
/// a credential belongs to one origin. A position above zero asks for the rest of the content.
pub fn follow(
    mut url: Url,
    host: &str,
    from: u64,
    request: impl Fn(Url) -> RequestBuilder,
) -> Result<Response, RegistryError> {
    for _ in 0..=limits::REDIRECTS {
        let mut request = request(url.clone());
        if from > 0 {
            request = request.header(RANGE, format!("bytes={from}-"));
        }
        let answer = request.send().map_err(|error| unreachable(host, error))?;
        if !answer.status().is_redirection() {
            return Ok(answer);
        }
        let target = answer.headers().get(LOCATION);
        url = redirect(&url, target.and_then(|to| to.to_str().ok()), host)?;
    }
    Err(RegistryError::Redirects {
        host: host.to_owned(),
        limit: limits::REDIRECTS,
    })
}

/// All bytes of a small answer.
pub fn bounded(answer: Response, what: &str, limit: u64) -> Result<Vec<u8>, RegistryError> {
    let mut bytes = Vec::new();
    let promised = answer.content_length();
    let long = || RegistryError::TooLong {
        what: what.to_owned(),
        limit,
    };
    if promised.is_some_and(|promised| promised > limit) {
        return Err(long());
    }
    let read = answer.take(limit + 1).read_to_end(&mut bytes);
    if bytes.len() as u64 > limit {
        return Err(long());
    }
    read.map_err(|source| RegistryError::Truncated {
        what: what.to_owned(),
        got: bytes.len() as u64,
        size: promised.unwrap_or(0),
        source: Some(source),
    })?;
    Ok(bytes)
}
