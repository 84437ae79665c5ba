//! HTTP to one registry: redirects, login, retries. Every answer has a bound.
//!
//! A login goes to the registry's own origin and to the token service that it names, nowhere else: a redirect to
//! another origin, such as a content server, is followed without it.

use std::io::Read;
use std::sync::Mutex;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use reqwest::blocking::{Client, Response};
use reqwest::header::{ACCEPT, AUTHORIZATION, LOCATION, RANGE, RETRY_AFTER, WWW_AUTHENTICATE};
use reqwest::{Certificate, StatusCode, Url};
use serde::Deserialize;

use super::challenge::{self, Challenge};
use super::error::RegistryError;
use crate::auth::Credential;
use crate::limits;
use crate::registries::{Endpoint, is_loopback};

const CONNECT: Duration = Duration::from_secs(10);
/// The longest silence within an answer.
const SILENCE: Duration = Duration::from_secs(30);
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// A connection to one endpoint, for one repository.
#[derive(Debug)]
pub struct Session {
    endpoint: Endpoint,
    base: Url,
    http: Client,
    credential: Option<Credential>,
    /// The `Authorization` header that the registry took last. Never printed: the type of its place is not `Debug`.
    authorization: Mutex<Header>,
}

#[derive(Default)]
struct Header(Option<String>);

impl std::fmt::Debug for Header {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "…" } else { "none" })
    }
}

impl Session {
    pub fn new(endpoint: Endpoint, credential: Option<Credential>) -> Result<Self, RegistryError> {
        // Fails if another part of the process has installed a provider, which is fine.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let host = endpoint.host.clone();
        let base = Url::parse(&endpoint.base).map_err(|_| RegistryError::Redirect {
            host,
            problem: "it is not a URL",
        })?;
        let mut builder = Client::builder()
            .connect_timeout(CONNECT)
            .timeout(SILENCE)
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .user_agent(concat!("forkd/", env!("CARGO_PKG_VERSION")));
        if is_loopback(&endpoint.host) {
            builder = builder.no_proxy();
        }
        if let Some(path) = &endpoint.ca {
            let failed = |source| RegistryError::Certificate {
                path: path.clone(),
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
        let session = Self {
            endpoint,
            base,
            http: builder.build().map_err(RegistryError::Setup)?,
            credential,
            authorization: Mutex::default(),
        };
        if let Some(Credential::Bearer { token }) = &session.credential {
            session.keep(format!("Bearer {}", token.reveal()));
        }
        Ok(session)
    }

    /// Host and port, for people.
    pub fn host(&self) -> &str {
        &self.endpoint.host
    }

    /// Asks for a document or a blob, from this byte on. The answer is a success or an error.
    pub fn get(
        &self,
        path: &str,
        what: &str,
        accept: &str,
        from: u64,
    ) -> Result<Response, RegistryError> {
        let url = format!("/v2/{}/{path}", self.endpoint.repository);
        let mut pause = FIRST_PAUSE;
        let mut attempt = 1;
        loop {
            let error = match self.once(&url, what, accept, from) {
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

    fn once(
        &self,
        path: &str,
        what: &str,
        accept: &str,
        from: u64,
    ) -> Result<Response, RegistryError> {
        let mut response = self.follow(path, accept, from)?;
        if response.status() == StatusCode::UNAUTHORIZED {
            self.log_in(&response, what)?;
            response = self.follow(path, accept, from)?;
        }
        let host = self.host().to_owned();
        let status = response.status();
        match status.as_u16() {
            200 | 206 => Ok(response),
            401 | 403 => Err(self.denied(what)),
            404 => Err(RegistryError::NotFound {
                host,
                what: what.to_owned(),
            }),
            429 | 500..=599 => Err(RegistryError::Busy {
                host,
                status: status.as_u16(),
                after: retry_after(&response),
            }),
            status => Err(RegistryError::Status { host, status }),
        }
    }

    fn denied(&self, what: &str) -> RegistryError {
        RegistryError::Denied {
            host: self.host().to_owned(),
            what: what.to_owned(),
            credential: self.credential.is_some(),
        }
    }

    fn unreachable(&self, source: reqwest::Error) -> RegistryError {
        RegistryError::Unreachable {
            host: self.host().to_owned(),
            // A content server's URL may have a signature in it.
            source: source.without_url(),
        }
    }

    fn follow(&self, path: &str, accept: &str, from: u64) -> Result<Response, RegistryError> {
        let wrong = |problem| RegistryError::Redirect {
            host: self.host().to_owned(),
            problem,
        };
        let mut url = self.base.join(path).map_err(|_| wrong("it is not a URL"))?;
        for _ in 0..=limits::REDIRECTS {
            let mut request = self.http.get(url.clone()).header(ACCEPT, accept);
            if url.origin() == self.base.origin()
                && let Some(header) = self.kept()
            {
                request = request.header(AUTHORIZATION, header);
            }
            if from > 0 {
                request = request.header(RANGE, format!("bytes={from}-"));
            }
            let response = request.send().map_err(|error| self.unreachable(error))?;
            if !response.status().is_redirection() {
                return Ok(response);
            }
            let target = response
                .headers()
                .get(LOCATION)
                .and_then(|to| to.to_str().ok());
            let target = target.and_then(|to| url.join(to).ok());
            let target = target.ok_or_else(|| wrong("it is not a URL"))?;
            match (url.scheme(), target.scheme()) {
                (_, "https") | ("http", "http") => url = target,
                ("https", "http") => return Err(wrong("it leads from https to http")),
                _ => return Err(wrong("it is neither http nor https")),
            }
        }
        Err(RegistryError::Redirects {
            host: self.host().to_owned(),
            limit: limits::REDIRECTS,
        })
    }

    fn kept(&self) -> Option<String> {
        let kept = self.authorization.lock();
        kept.unwrap_or_else(std::sync::PoisonError::into_inner)
            .0
            .clone()
    }

    fn keep(&self, header: String) {
        let kept = self.authorization.lock();
        kept.unwrap_or_else(std::sync::PoisonError::into_inner).0 = Some(header);
    }

    /// Gets a new `Authorization` header, as the answer asks for.
    fn log_in(&self, response: &Response, what: &str) -> Result<(), RegistryError> {
        let headers = response.headers().get_all(WWW_AUTHENTICATE);
        let asked = headers
            .iter()
            .find_map(|one| challenge::parse(one.to_str().ok()?));
        let unknown = |problem| RegistryError::Challenge {
            host: self.host().to_owned(),
            problem,
        };
        match (asked, &self.credential) {
            (None, _) => Err(unknown("neither Basic nor Bearer")),
            (Some(Challenge::Basic), Some(Credential::Password { username, password })) => {
                let text = STANDARD.encode(format!("{username}:{}", password.reveal()));
                self.keep(format!("Basic {text}"));
                Ok(())
            }
            (Some(Challenge::Basic), _) | (_, Some(Credential::Bearer { .. })) => {
                Err(self.denied(what))
            }
            (
                Some(Challenge::Bearer {
                    realm,
                    service,
                    scope,
                }),
                credential,
            ) => {
                let mut url = Url::parse(&realm).map_err(|_| unknown("the realm is not a URL"))?;
                // The service gets the password: it must be the registry itself, or be asked over TLS.
                let safe = url.scheme() == "https"
                    || url.scheme() == "http"
                        && url.host_str() == self.base.host_str()
                        && self.base.scheme() == "http";
                if !safe {
                    return Err(unknown("its token service is not asked over https"));
                }
                let scope = scope
                    .unwrap_or_else(|| format!("repository:{}:pull", self.endpoint.repository));
                let mut query = Url::parse("x:/").map_err(|_| unknown("its query is malformed"))?;
                query.query_pairs_mut().append_pair("scope", &scope);
                if let Some(service) = &service {
                    query.query_pairs_mut().append_pair("service", service);
                }
                let request = match credential {
                    Some(Credential::Identity { token }) => {
                        query
                            .query_pairs_mut()
                            .append_pair("grant_type", "refresh_token")
                            .append_pair("client_id", "forkd")
                            .append_pair("refresh_token", token.reveal());
                        self.http
                            .post(url)
                            .header("content-type", "application/x-www-form-urlencoded")
                            .body(query.query().unwrap_or_default().to_owned())
                    }
                    Some(Credential::Password { username, password }) => {
                        url.set_query(query.query());
                        self.http
                            .get(url)
                            .basic_auth(username, Some(password.reveal()))
                    }
                    _ => {
                        url.set_query(query.query());
                        self.http.get(url)
                    }
                };
                let answer = request.send().map_err(|error| self.unreachable(error))?;
                self.keep_token(answer, what)
            }
        }
    }

    fn keep_token(&self, answer: Response, what: &str) -> Result<(), RegistryError> {
        #[derive(Deserialize)]
        struct Answer {
            token: Option<String>,
            access_token: Option<String>,
        }
        let unknown = |problem| RegistryError::Challenge {
            host: self.host().to_owned(),
            problem,
        };
        match answer.status().as_u16() {
            200 => {}
            401 | 403 => return Err(self.denied(what)),
            status @ (429 | 500..=599) => {
                return Err(RegistryError::Busy {
                    host: self.host().to_owned(),
                    status,
                    after: retry_after(&answer),
                });
            }
            _ => return Err(unknown("its token service refuses the request")),
        }
        let bytes = bounded(answer, "the answer of the token service", limits::TOKEN)?;
        let answer: Answer = serde_json::from_slice(&bytes)
            .map_err(|_| unknown("the answer of its token service does not parse"))?;
        let token = answer.token.or(answer.access_token).unwrap_or_default();
        // A token stands in a header.
        if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(unknown("its token service gives no token"));
        }
        self.keep(format!("Bearer {token}"));
        Ok(())
    }
}

fn retry_after(response: &Response) -> Option<Duration> {
    let text = response.headers().get(RETRY_AFTER)?.to_str().ok()?;
    text.parse().ok().map(Duration::from_secs)
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
