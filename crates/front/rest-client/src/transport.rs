//! HTTP requests and their answers.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use forkd_api::{ErrorBody, ErrorCode};
use futures::future::BoxFuture;
use reqwest::{Body, Certificate, Method, RequestBuilder, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, Target};

/// Timeout for establishing a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// A client of one daemon. Cheap to clone; connections are shared.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    /// HTTP/1 only: a WebSocket upgrade does not exist in HTTP/2.
    http1: reqwest::Client,
    target: Target,
    token: Option<String>,
    inside: Option<Inside>,
}

/// A daemon in this process: a function that answers requests without a socket.
#[derive(Clone)]
pub struct Inside(Arc<dyn Fn(http::Request<Body>) -> Answering + Send + Sync>);

type Answering = BoxFuture<'static, http::Response<Body>>;

impl Inside {
    /// Requests are answered by this function.
    pub fn new(answer: impl Fn(http::Request<Body>) -> Answering + Send + Sync + 'static) -> Self {
        Self(Arc::new(answer))
    }
}

impl fmt::Debug for Inside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inside").finish_non_exhaustive()
    }
}

impl Client {
    /// A client that trusts the certificates of the host. Does not connect yet.
    pub fn new(target: &Target, token: Option<String>) -> Result<Self, Error> {
        Self::build(target, token, &[])
    }

    /// A client that trusts these certificates (PEM) besides those of the host. Does not connect yet.
    pub fn trusting(target: &Target, token: Option<String>, pem: &[u8]) -> Result<Self, Error> {
        let trusted = Certificate::from_pem_bundle(pem).map_err(Error::Setup)?;
        if trusted.is_empty() {
            return Err(Error::NoCertificate);
        }
        Self::build(target, token, &trusted)
    }

    fn build(
        target: &Target,
        token: Option<String>,
        trusted: &[Certificate],
    ) -> Result<Self, Error> {
        // Fails if another part of the process has installed a provider, which is fine.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let builder = || {
            let builder = reqwest::Client::builder()
                .connect_timeout(CONNECT)
                .user_agent(concat!("forkd/", env!("CARGO_PKG_VERSION")));
            let builder = if target.is_tls() {
                builder.tls_certs_merge(trusted.to_vec())
            } else {
                // Without TLS no root certificates are needed: a minimal Debian has none.
                builder.tls_certs_only([])
            };
            match target {
                Target::Unix(path) => builder.unix_socket(path.as_path()).no_proxy(),
                // Never use a proxy for loopback: it would reach the proxy host's own daemon.
                Target::Url(_) if target.is_loopback() => builder.no_proxy(),
                Target::Url(_) => builder,
            }
        };
        let http = builder().build().map_err(Error::Setup)?;
        let http1 = if target.is_tls() {
            builder().http1_only().build().map_err(Error::Setup)?
        } else {
            http.clone()
        };
        Ok(Self {
            http,
            http1,
            target: target.clone(),
            token: token.filter(|token| !token.is_empty()),
            inside: None,
        })
    }

    /// The same client, for a daemon in this process. Connections and the token of this client are not used.
    pub fn inside(&self, daemon: Inside) -> Self {
        Self {
            token: None,
            inside: Some(daemon),
            ..self.clone()
        }
    }

    /// The address of the daemon.
    pub fn target(&self) -> &Target {
        &self.target
    }

    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.with_token(self.http.request(method, self.url(path)))
    }

    /// A request of another client, to be sent on with that client's token and not with this one's.
    pub fn pass_on(&self, method: Method, path: &str, upgrade: bool) -> RequestBuilder {
        let http = if upgrade { &self.http1 } else { &self.http };
        http.request(method, self.url(path))
    }

    /// A request that upgrades its connection to another protocol.
    pub(crate) fn upgrade(&self, path: &str) -> RequestBuilder {
        self.with_token(self.http1.get(self.url(path)))
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.target.base())
    }

    fn with_token(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }

    /// Sends a request. An answer that is not a success becomes [`Error::Refused`].
    pub(crate) async fn send(&self, request: RequestBuilder) -> Result<Response, Error> {
        let response = self.transfer(request).await.map_err(|source| {
            if source.is_connect() || source.is_builder() {
                Error::Unreachable {
                    target: self.target.to_string(),
                    source: Error::root(source),
                }
            } else {
                Error::CutOff(Error::root(source))
            }
        })?;
        if response.status().is_success() || response.status().is_informational() {
            return Ok(response);
        }
        let status = response.status().as_u16();
        let bytes = response
            .bytes()
            .await
            .map_err(|error| Error::CutOff(Error::root(error)))?;
        let body = serde_json::from_slice(&bytes).unwrap_or_else(|_| ErrorBody {
            error: format!(
                "HTTP {status}: {}",
                String::from_utf8_lossy(&bytes)
                    .chars()
                    .take(200)
                    .collect::<String>()
            ),
            code: ErrorCode::Internal,
            hint: None,
            request_id: None,
        });
        Err(Error::Refused { status, body })
    }

    async fn transfer(&self, request: RequestBuilder) -> Result<Response, reqwest::Error> {
        match &self.inside {
            None => request.send().await,
            Some(Inside(answer)) => {
                let request = http::Request::try_from(request.build()?)?;
                Ok(answer(request).await.into())
            }
        }
    }

    pub(crate) async fn json<T: DeserializeOwned>(
        &self,
        request: RequestBuilder,
    ) -> Result<T, Error> {
        let response = self.send(request).await?;
        let status = response.status().as_u16();
        let bytes = response
            .bytes()
            .await
            .map_err(|error| Error::CutOff(Error::root(error)))?;
        serde_json::from_slice(&bytes).map_err(|source| Error::BadAnswer { status, source })
    }

    pub(crate) async fn text(&self, request: RequestBuilder) -> Result<String, Error> {
        let response = self.send(request).await?;
        response
            .text()
            .await
            .map_err(|error| Error::CutOff(Error::root(error)))
    }

    pub(crate) async fn nothing(&self, request: RequestBuilder) -> Result<(), Error> {
        self.send(request).await.map(drop)
    }

    pub(crate) fn get(&self, path: &str) -> RequestBuilder {
        self.request(Method::GET, path)
    }

    pub(crate) fn post(&self, path: &str, body: &impl Serialize) -> RequestBuilder {
        self.request(Method::POST, path).json(body)
    }
}
