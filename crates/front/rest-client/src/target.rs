//! The address of a daemon.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use thiserror::Error;

/// The address of a daemon: `http://host:port`, `https://host:port` or `unix:///path`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// TCP, with or without TLS. The URL has no trailing slash.
    Url(String),
    /// A Unix socket.
    Unix(PathBuf),
}

/// Why an address is rejected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{text:?} is not the address of a daemon: write http://HOST:PORT, https://HOST:PORT or unix:///PATH"
)]
pub struct InvalidTarget {
    /// The rejected text.
    pub text: String,
}

impl FromStr for Target {
    type Err = InvalidTarget;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || InvalidTarget {
            text: text.to_owned(),
        };
        if let Some(path) = text.strip_prefix("unix://") {
            let path = PathBuf::from(path);
            return if path.is_absolute() {
                Ok(Self::Unix(path))
            } else {
                Err(error())
            };
        }
        let rest = text
            .strip_prefix("http://")
            .or_else(|| text.strip_prefix("https://"))
            .ok_or_else(error)?;
        let host = rest.trim_end_matches('/');
        if host.is_empty() || host.contains(['/', '?', '#', ' ', '@']) {
            return Err(error());
        }
        Ok(Self::Url(text.trim_end_matches('/').to_owned()))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Url(url) => f.write_str(url),
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
        }
    }
}

impl Target {
    /// Whether the daemon must present a certificate.
    pub(crate) fn is_tls(&self) -> bool {
        matches!(self, Self::Url(url) if url.starts_with("https://"))
    }

    /// Whether the address is a Unix socket or a loopback address, which only this host can reach.
    pub(crate) fn is_loopback(&self) -> bool {
        let Self::Url(url) = self else {
            return true;
        };
        let url = reqwest::Url::parse(url);
        let Some(host) = url.as_ref().ok().and_then(reqwest::Url::host_str) else {
            return false;
        };
        let address = host.trim_start_matches('[').trim_end_matches(']');
        match address.parse::<IpAddr>() {
            Ok(address) => address.is_loopback(),
            Err(_) => host == "localhost" || host.ends_with(".localhost"),
        }
    }

    /// The part of a URL before the route.
    pub(crate) fn base(&self) -> &str {
        match self {
            Self::Url(url) => url,
            Self::Unix(_) => "http://localhost",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_is_told_from_others() {
        let at = |text: &str| text.parse::<Target>().unwrap().is_loopback();
        for text in [
            "http://127.0.0.1:8889",
            "http://127.1.2.3",
            "http://localhost:1",
            "https://LOCALHOST",
            "http://a.localhost:1",
            "http://[::1]:8889",
            "unix:///run/x.sock",
        ] {
            assert!(at(text), "{text}");
        }
        for text in [
            "http://10.0.0.1:8889",
            "http://localhost.example",
            "http://[::2]:1",
        ] {
            assert!(!at(text), "{text}");
        }
    }

    #[test]
    fn addresses_people_write() {
        for text in ["http://127.0.0.1:8889", "https://h:1", "unix:///run/x.sock"] {
            assert_eq!(text.parse::<Target>().unwrap().to_string(), text);
        }
        assert_eq!(
            "http://h:1/".parse::<Target>().unwrap().to_string(),
            "http://h:1"
        );
        for text in [
            "",
            "h:1",
            "unix://x",
            "http://",
            "http://u@h",
            "ftp://h",
            "http://h/x",
        ] {
            assert!(text.parse::<Target>().is_err(), "{text:?}");
        }
    }
}
