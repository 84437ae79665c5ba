//! Names of images in registries, as users write them: `[HOST[:PORT]/]PATH[:TAG][@DIGEST]`.
//!
//! A name without a host is completed from the configuration ([`crate::registries`]): no registry is built in.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::digest::Digest;

/// The tag of a name that has neither tag nor digest.
pub const LATEST: &str = "latest";
const MAX_NAME: usize = 255;
const MAX_TAG: usize = 128;

/// The name of an image in a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageName {
    /// Host and port; a name without one is short.
    pub host: Option<String>,
    /// For example `team/python`.
    pub path: String,
    pub tag: Option<String>,
    /// Pins the content: what the registry sends must have this digest.
    pub digest: Option<Digest>,
}

/// Why text does not name an image.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{text:?} is not the name of an image: {problem}")]
pub struct NameError {
    /// The start of the text.
    pub text: String,
    pub problem: &'static str,
}

impl FromStr for ImageName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let bad = |problem| NameError {
            text: text.chars().take(200).collect(),
            problem,
        };
        let rest = text.strip_prefix("docker://").unwrap_or(text);
        let (rest, digest) = match rest.split_once('@') {
            Some((rest, digest)) => {
                let digest = digest
                    .parse()
                    .map_err(|_| bad("after @ comes sha256: and 64 hexadecimal digits"))?;
                (rest, Some(digest))
            }
            None => (rest, None),
        };
        let (host, rest) = match rest.split_once('/') {
            Some((first, rest)) if is_host(first) => (Some(first.to_owned()), rest),
            _ => (None, rest),
        };
        if host.as_deref().is_some_and(|host| !host_is_valid(host)) {
            return Err(bad("the host is malformed"));
        }
        let (path, tag) = match rest.split_once(':') {
            Some((path, tag)) => (path, Some(tag.to_owned())),
            None => (rest, None),
        };
        if path.is_empty() || path.len() > MAX_NAME || !path.split('/').all(part_is_valid) {
            return Err(bad(
                "its parts are lower-case letters and digits, with . _ - between them",
            ));
        }
        if tag.as_deref().is_some_and(|tag| !tag_is_valid(tag)) {
            return Err(bad(
                "a tag is at most 128 letters, digits, dots, hyphens and underscores",
            ));
        }
        Ok(Self {
            host,
            path: path.to_owned(),
            tag,
            digest,
        })
    }
}

/// The first part of a name is a host if it cannot be a part of a path.
fn is_host(text: &str) -> bool {
    text == "localhost" || text.contains(['.', ':', '['])
}

/// `name`, `name:port`, `1.2.3.4:port` or `[v6]:port`.
pub(crate) fn host_is_valid(text: &str) -> bool {
    let (name, port) = match text.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((address, port)) if address.parse::<std::net::Ipv6Addr>().is_ok() => (
                "v6",
                port.strip_prefix(':').or(port.is_empty().then_some("1")),
            ),
            _ => return false,
        },
        None => match text.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (text, Some("1")),
        },
    };
    let name_is_valid = !name.is_empty()
        && name.len() <= MAX_NAME
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'.' || b == b'-');
    name_is_valid && port.is_some_and(|port| port.parse::<u16>().is_ok_and(|port| port > 0))
}

fn part_is_valid(part: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = part.as_bytes();
    bytes.first().copied().is_some_and(plain)
        && bytes.last().copied().is_some_and(plain)
        && bytes.iter().all(|b| plain(*b) || b"._-".contains(b))
}

fn tag_is_valid(tag: &str) -> bool {
    tag.len() <= MAX_TAG
        && tag.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && tag
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}

impl ImageName {
    /// The tag to ask for, unless a digest is given.
    pub fn tag_or_latest(&self) -> &str {
        self.tag.as_deref().unwrap_or(LATEST)
    }

    /// The last part of the path, and the tag.
    pub(crate) fn short(&self) -> String {
        let last = self.path.rsplit('/').next().unwrap_or(&self.path);
        match &self.tag {
            Some(tag) => format!("{last}:{tag}"),
            None => last.to_owned(),
        }
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(host) = &self.host {
            write!(f, "{host}/")?;
        }
        f.write_str(&self.path)?;
        match (&self.tag, &self.digest) {
            (None, None) => write!(f, ":{LATEST}")?,
            (Some(tag), _) => write!(f, ":{tag}")?,
            (None, Some(_)) => {}
        }
        self.digest.map_or(Ok(()), |digest| write!(f, "@{digest}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_as_they_are_written() {
        let digest = Digest::of(b"x");
        for (text, host, path, tag) in [
            ("python:3-slim", None, "python", Some("3-slim")),
            ("team/app:1", None, "team/app", Some("1")),
            ("localhost/app:1", Some("localhost"), "app", Some("1")),
            (
                "10.0.0.5:5000/a/b:x",
                Some("10.0.0.5:5000"),
                "a/b",
                Some("x"),
            ),
            ("[::1]:5000/a:x", Some("[::1]:5000"), "a", Some("x")),
        ] {
            let name: ImageName = text.parse().unwrap();
            assert_eq!(name.host.as_deref(), host, "{text}");
            assert_eq!(name.path, path, "{text}");
            assert_eq!(name.tag.as_deref(), tag, "{text}");
            assert_eq!(name.to_string(), text);
            let pinned: ImageName = format!("docker://{text}@{digest}").parse().unwrap();
            assert_eq!(pinned.digest, Some(digest));
        }
        let latest: ImageName = "team/app".parse().unwrap();
        assert_eq!(latest.to_string(), "team/app:latest");
    }

    #[test]
    fn malformed_names_are_refused() {
        for text in [
            "",
            "Python:3",
            "a//b",
            "a/../b",
            "-a:1",
            "a:",
            "a:b c",
            "a@sha256:1",
            "host:0/a",
            "host:x/a",
            "[::1/a",
            "a\n:1",
            "http://a/b",
        ] {
            assert!(text.parse::<ImageName>().is_err(), "{text:?}");
        }
    }
}
