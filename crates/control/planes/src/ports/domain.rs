//! Host names of ports: `PORT-ID.domain`.

use std::fmt;

use axum::http::{HeaderMap, Uri, header};

/// The domain below which ports have host names, with a port if it is not the usual one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Domain(String);

impl Domain {
    /// Checks a domain as it was typed; none if it is not a host name in lower case with an optional port.
    pub fn new(text: &str) -> Option<Self> {
        let (host, port) = match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        };
        let is_label = |label: &str| {
            (1..=63).contains(&label.len())
                && !label.starts_with('-')
                && label
                    .bytes()
                    .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        };
        let valid = host.len() <= 200
            && host.split('.').all(is_label)
            && port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0));
        valid.then(|| Self(text.to_owned()))
    }

    /// The domain without its port.
    pub fn host(&self) -> &str {
        self.0.split_once(':').map_or(&self.0, |(host, _)| host)
    }

    /// The port and the sandbox ID that the host of a request names, the ID unchecked.
    pub fn names(&self, uri: &Uri, headers: &HeaderMap) -> Option<(u16, String)> {
        let host = match uri.host() {
            Some(host) => host,
            None => headers.get(header::HOST)?.to_str().ok()?,
        };
        let host = host.split_once(':').map_or(host, |(host, _)| host);
        let host = host.to_ascii_lowercase();
        let label = host.strip_suffix(self.host())?.strip_suffix('.')?;
        let (port, id) = label.split_once('-')?;
        Some((port.parse().ok()?, id.to_owned()))
    }
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_name_a_port_and_a_sandbox() {
        let id = "sb0123456789abcdef01234567";
        let domain = Domain::new("box.test:8443").unwrap();
        let uri = Uri::from_static("/x");
        let names = |host: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, host.parse().unwrap());
            domain.names(&uri, &headers)
        };
        let found = Some((3000, id.to_owned()));
        assert_eq!(names(&format!("3000-{id}.box.test:8443")), found);
        assert_eq!(
            names(&format!("3000-{}.BOX.test", id.to_uppercase())),
            found
        );
        // HTTP/2 has the host in the URI.
        let whole: Uri = format!("https://3000-{id}.box.test/x").parse().unwrap();
        assert_eq!(domain.names(&whole, &HeaderMap::new()), found);
        for bad in [
            "box.test",
            "api.box.test",
            "x-y.box.test",
            "70000-a.box.test",
            "3000-a.other.test",
            "3000-abox.test",
        ] {
            assert_eq!(names(bad), None, "{bad}");
        }
        for bad in ["", "A.b", "a..b", "a:b", "a:0", "-a", "a/b"] {
            assert!(Domain::new(bad).is_none(), "{bad}");
        }
    }
}
