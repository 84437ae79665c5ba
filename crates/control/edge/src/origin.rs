//! Requests that a web page made.
//!
//! A daemon on a loopback port without tokens trusts every local program, and a browser is one. Two ways in are closed for
//! requests without a token:
//!
//! - DNS rebinding: the page's own host name resolves to 127.0.0.1. The `Host` header still has that name, so only
//!   loopback hosts and configured names are accepted.
//! - Cross-site requests: browsers send `Origin` or `Sec-Fetch-Site` with them. A request whose origin is not the host it
//!   was sent to is refused. Clients that are no browsers send neither header.
//!
//! Browsers send some `POST`s without asking first, but none with a JSON content type. [`check_content`] therefore wants it
//! on every `POST` with a body, token or not; one without body and content type is accepted, since published clients send it.

use std::net::IpAddr;

use axum::body::HttpBody;
use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, Method, Uri, header};
use forkd_api::ErrorCode;

use crate::errors::Failure;

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The hosts under which clients without a token may address the daemon.
#[derive(Debug, Clone, Default)]
pub struct Hosts {
    names: Vec<String>,
}

impl Hosts {
    /// Loopback addresses, `localhost`, and these names.
    pub fn new(names: &[String]) -> Self {
        Self {
            names: names.iter().map(|name| name.to_ascii_lowercase()).collect(),
        }
    }

    fn accept(&self, authority: &Authority) -> bool {
        let host = authority.host().to_ascii_lowercase();
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        // A browser sends no user name in Host.
        if authority.as_str().contains('@') {
            return false;
        }
        bare == "localhost"
            || bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
            || self.names.contains(&host)
    }

    /// Refuses a request of a web page from elsewhere.
    pub fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), Failure> {
        if host(uri, headers).is_none_or(|host| !self.accept(&host)) {
            return Err(refused(
                "the Host header names no host of this daemon",
                "use http://127.0.0.1 or http://localhost, send a token, or start the daemon with --allow-host NAME",
            ));
        }
        check_origin(uri, headers)
    }
}

fn host(uri: &Uri, headers: &HeaderMap) -> Option<Authority> {
    match uri.authority() {
        Some(authority) => Some(authority.clone()),
        None => text(headers, &header::HOST).and_then(|host| host.parse().ok()),
    }
}

/// Refuses a request of a web page whose origin is not the host of the request.
pub fn check_origin(uri: &Uri, headers: &HeaderMap) -> Result<(), Failure> {
    let host = host(uri, headers);
    let foreign = match text(headers, &header::ORIGIN) {
        None => false,
        // A page of the daemon's own host and port. "null" does not parse.
        Some(origin) => origin
            .parse::<Uri>()
            .ok()
            .and_then(|origin| origin.into_parts().authority)
            .is_none_or(|origin| Some(origin) != host),
    };
    let cross_site =
        text(headers, &FETCH_SITE).is_some_and(|site| !matches!(site, "same-origin" | "none"));
    if foreign || cross_site {
        return Err(refused(
            "the request comes from a web page of another origin",
            "send a token, or use a client that is no browser",
        ));
    }
    Ok(())
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    // A value that is no text matches nothing that is allowed.
    headers
        .get(name)
        .map(|value| value.to_str().unwrap_or("invalid"))
}

fn refused(message: &str, hint: &str) -> Failure {
    Failure::new(ErrorCode::Forbidden, message).with_hint(hint)
}

/// The media type of the body, in lower case.
pub fn content_type(headers: &HeaderMap) -> Option<String> {
    text(headers, &header::CONTENT_TYPE).map(str::to_ascii_lowercase)
}

/// Whether a media type is JSON.
pub fn is_json(kind: &str) -> bool {
    let kind = kind.split(';').next().unwrap_or_default().trim();
    kind == "application/json" || kind.ends_with("+json")
}

/// The refusal of a body that is not JSON.
pub fn not_json(kind: Option<&str>) -> Failure {
    Failure::new(
        ErrorCode::UnsupportedMediaType,
        match kind {
            Some(kind) => format!("the body is {kind:?}, not JSON"),
            None => "the request does not say what its body is".to_owned(),
        },
    )
    .with_hint("send the header Content-Type: application/json")
}

/// Refuses a `POST` that a browser sends to other sites without asking them first.
pub fn check_content(request: &Request) -> Result<(), Failure> {
    if request.method() != Method::POST {
        return Ok(());
    }
    match content_type(request.headers()) {
        // Not a type that a web page can send without asking first.
        Some(kind) if kind == "application/octet-stream" => Ok(()),
        Some(kind) if !is_json(&kind) => Err(not_json(Some(&kind))),
        None if !request.body().is_end_stream() => Err(not_json(None)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;

    fn check(headers: &[(&str, &str)]) -> bool {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(name.parse::<HeaderName>().unwrap(), value.parse().unwrap());
        }
        let hosts = Hosts::new(&["Build.Example".to_owned()]);
        hosts
            .check(&Uri::from_static("/v1/sandboxes"), &map)
            .is_ok()
    }

    #[test]
    fn only_names_of_this_host_are_accepted() {
        for host in [
            "127.0.0.1:8889",
            "127.8.8.8",
            "localhost",
            "LOCALHOST:1",
            "[::1]:8889",
            "build.example:8889",
        ] {
            assert!(check(&[("host", host)]), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "10.0.0.1",
            "[::2]",
            "a@127.0.0.1:x",
        ] {
            assert!(!check(&[("host", host)]), "{host}");
        }
        assert!(!check(&[]));
    }

    #[test]
    fn pages_of_other_origins_are_refused() {
        let host = ("host", "127.0.0.1:8889");
        for origin in [
            "https://evil.example",
            "null",
            "http://127.0.0.1:3000",
            "http://localhost:8889",
            "",
        ] {
            assert!(!check(&[host, ("origin", origin)]), "{origin}");
        }
        assert!(check(&[host, ("origin", "http://127.0.0.1:8889")]));
        for site in ["cross-site", "same-site", "odd"] {
            assert!(!check(&[host, ("sec-fetch-site", site)]), "{site}");
        }
        for site in ["same-origin", "none"] {
            assert!(check(&[host, ("sec-fetch-site", site)]), "{site}");
        }
    }

    #[test]
    fn posts_as_published_clients_send_them_pass_and_forms_do_not() {
        let post = |kind: Option<&str>, body: &'static str| {
            let mut request = Request::post("/v1/sandboxes/sb-1/ping");
            if let Some(kind) = kind {
                request = request.header("content-type", kind);
            }
            check_content(&request.body(Body::from(body)).unwrap()).is_ok()
        };
        assert!(post(None, ""));
        assert!(post(Some("application/json"), ""));
        assert!(post(Some("application/json; charset=utf-8"), "{}"));
        assert!(!post(None, "{}"));
        for kind in [
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
        ] {
            assert!(!post(Some(kind), "") && !post(Some(kind), "{}"), "{kind}");
        }
    }
}
