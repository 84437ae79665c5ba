//! HTTP to one registry: redirects, login, retries. Every answer has a bound.
//!
//! A login goes to the registry's own origin and to the token service that it names, nowhere else: a redirect to
//! another origin, such as a content server, is followed without it.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use parking_lot::Mutex;
use reqwest::blocking::{Client, RequestBuilder, Response};
use reqwest::header::{ACCEPT, AUTHORIZATION, WWW_AUTHENTICATE};
use reqwest::{StatusCode, Url};
use serde::Deserialize;

use super::blobs::BlobSource;
use super::challenge::{self, Challenge};
use super::error::RegistryError;
use crate::auth::Credential;
use crate::digest::Digest;
use crate::http::{self, bounded};
use crate::limits;
use crate::registries::Endpoint;

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
        let host = endpoint.host.clone();
        let base = Url::parse(&endpoint.base).map_err(|_| RegistryError::Redirect {
            host,
            problem: "it is not a URL",
        })?;
        let http = http::client(&base, &endpoint.host, endpoint.ca.as_deref())?;
        let session = Self {
            endpoint,
            base,
            http,
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
        http::patiently(|| self.once(&url, what, accept, from))
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
        http::judged(response, self.host(), what, self.credential.is_some())
    }

    /// Sends a request that changes the registry, or asks about an upload, and repeats it if its failure may pass.
    pub fn send(
        &self,
        path: &str,
        what: &str,
        make: &dyn Fn(&Client, Url) -> RequestBuilder,
    ) -> Result<Response, RegistryError> {
        http::patiently(|| self.try_send(path, what, make))
    }

    /// Sends a request once. `path` may be a URL that the registry gave; the login goes along only to the registry's
    /// own origin. Redirects are not followed.
    pub fn try_send(
        &self,
        path: &str,
        what: &str,
        make: &dyn Fn(&Client, Url) -> RequestBuilder,
    ) -> Result<Response, RegistryError> {
        let url = self.url(path)?;
        let mut response = self.send_once(&url, make)?;
        if response.status() == StatusCode::UNAUTHORIZED {
            self.log_in(&response, what)?;
            response = self.send_once(&url, make)?;
        }
        http::judged(response, self.host(), what, self.credential.is_some())
    }

    fn send_once(
        &self,
        url: &Url,
        make: &dyn Fn(&Client, Url) -> RequestBuilder,
    ) -> Result<Response, RegistryError> {
        let mut request = make(&self.http, url.clone());
        if url.origin() == self.base.origin()
            && let Some(header) = self.kept()
        {
            request = request.header(AUTHORIZATION, header);
        }
        request.send().map_err(|error| self.unreachable(error))
    }

    /// The repository, for people and for names of files.
    pub fn repository(&self) -> &str {
        &self.endpoint.repository
    }

    /// A URL of the repository, or one that the registry gave.
    fn url(&self, path: &str) -> Result<Url, RegistryError> {
        if path.starts_with('/') || path.contains("://") {
            return http::redirect(&self.base, Some(path), self.host());
        }
        let path = format!("/v2/{}/{path}", self.endpoint.repository);
        http::redirect(&self.base, Some(&path), self.host())
    }

    fn denied(&self, what: &str) -> RegistryError {
        RegistryError::Denied {
            host: self.host().to_owned(),
            what: what.to_owned(),
            credential: self.credential.is_some(),
        }
    }

    fn unreachable(&self, source: reqwest::Error) -> RegistryError {
        http::unreachable(self.host(), source)
    }

    fn follow(&self, path: &str, accept: &str, from: u64) -> Result<Response, RegistryError> {
        let wrong = |problem| RegistryError::Redirect {
            host: self.host().to_owned(),
            problem,
        };
        let url = self.base.join(path).map_err(|_| wrong("it is not a URL"))?;
        http::follow(url, self.host(), from, |url| {
            let is_ours = url.origin() == self.base.origin();
            let request = self.http.get(url).header(ACCEPT, accept);
            match self.kept().filter(|_| is_ours) {
                Some(header) => request.header(AUTHORIZATION, header),
                None => request,
            }
        })
    }

    fn kept(&self) -> Option<String> {
        self.authorization.lock().0.clone()
    }

    fn keep(&self, header: String) {
        self.authorization.lock().0 = Some(header);
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
                    after: http::retry_after(&answer),
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

impl BlobSource for Session {
    fn host(&self) -> &str {
        self.host()
    }

    fn blob(&self, digest: Digest, what: &str, from: u64) -> Result<Response, RegistryError> {
        self.get(&format!("blobs/{digest}"), what, "*/*", from)
    }
}
