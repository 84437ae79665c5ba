//! `registries.toml`: the registry of short names, mirrors, and how each registry is reached.
//!
//! ```toml
//! schema = 1
//! default = "registry.example/library"   # `python:3` is registry.example/library/python:3
//! only_listed = false                    # true refuses registries without an entry
//! auth_file = "/etc/forkd/auth.json"
//!
//! [[registry]]
//! host = "registry.example"
//! mirrors = ["http://10.0.0.5:5000"]     # asked in this order, before the registry
//! plain_http = false                     # always true for loopback addresses
//! ca = "/etc/forkd/ca.pem"
//! ```

use std::path::{Path, PathBuf};

use serde::Deserialize;
use thiserror::Error;

use crate::name::{ImageName, host_is_valid};

pub const SCHEMA: u32 = 1;
/// The file of the host, unless another is named.
pub const DEFAULT_PATH: &str = "/etc/forkd/registries.toml";
const MAX_BYTES: u64 = 1 << 20;
const MAX_MIRRORS: usize = 8;

/// How registries are found and reached.
#[derive(Debug, Clone, Default)]
pub struct Registries {
    default: Option<DefaultRegistry>,
    only_listed: bool,
    auth_file: Option<PathBuf>,
    entries: Vec<Entry>,
}

/// The registry of names without a host.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DefaultRegistry {
    host: String,
    /// Put before names of one part.
    path: Option<String>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    host: String,
    #[serde(default)]
    mirrors: Vec<String>,
    #[serde(default)]
    plain_http: bool,
    #[serde(default)]
    ca: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    schema: u32,
    #[serde(default)]
    default: Option<String>,
    #[serde(default)]
    only_listed: bool,
    #[serde(default)]
    auth_file: Option<PathBuf>,
    #[serde(default)]
    registry: Vec<Entry>,
}

/// Why registries cannot be configured, or why a name leads to none.
#[derive(Debug, Error)]
pub enum RegistriesError {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{} does not parse", path.display())]
    Syntax {
        path: PathBuf,
        #[source]
        source: Box<toml::de::Error>,
    },
    #[error("{} has format {found}; this version reads format {SCHEMA}", path.display())]
    Schema { path: PathBuf, found: u32 },
    #[error("{text:?} is not a registry; write HOST[:PORT] or HOST[:PORT]/PATH")]
    Host { text: String },
    #[error("{text:?} is not a mirror; write http://HOST[:PORT][/PATH] or https://…")]
    Mirror { text: String },
    #[error("{host} has more than {MAX_MIRRORS} mirrors")]
    ManyMirrors { host: String },
    #[error("{name} names no registry, and no default registry is configured")]
    NoDefault { name: String },
    #[error("the registry {host} is not listed, and only listed registries are allowed")]
    NotListed { host: String },
}

/// One place that may have an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Scheme, host and port.
    pub base: String,
    /// Host and port, which credentials are kept under.
    pub host: String,
    pub repository: String,
    /// A certificate that is trusted besides those of the host.
    pub ca: Option<PathBuf>,
}

impl Registries {
    /// Reads a file. A default file that does not exist is an empty configuration.
    pub fn read(path: Option<&Path>) -> Result<Self, RegistriesError> {
        let given = path.is_some();
        let path = path.unwrap_or(Path::new(DEFAULT_PATH));
        let failed = |source| RegistriesError::Read {
            path: path.to_owned(),
            source,
        };
        let text = match std::fs::File::open(path) {
            Ok(file) => {
                let mut text = String::new();
                std::io::Read::read_to_string(&mut std::io::Read::take(file, MAX_BYTES), &mut text)
                    .map_err(failed)?;
                text
            }
            Err(error) if !given && error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Self::default());
            }
            Err(error) => return Err(failed(error)),
        };
        Self::parse(&text, path)
    }

    fn parse(text: &str, path: &Path) -> Result<Self, RegistriesError> {
        let file: File = toml::from_str(text).map_err(|source| RegistriesError::Syntax {
            path: path.to_owned(),
            source: Box::new(source),
        })?;
        if file.schema != SCHEMA {
            return Err(RegistriesError::Schema {
                path: path.to_owned(),
                found: file.schema,
            });
        }
        for entry in &file.registry {
            if !host_is_valid(&entry.host) {
                return Err(bad_host(&entry.host));
            }
            if entry.mirrors.len() > MAX_MIRRORS {
                return Err(RegistriesError::ManyMirrors {
                    host: entry.host.clone(),
                });
            }
            for mirror in &entry.mirrors {
                split_mirror(mirror)?;
            }
        }
        let mut registries = Self {
            default: None,
            only_listed: file.only_listed,
            auth_file: file.auth_file,
            entries: file.registry,
        };
        if let Some(text) = &file.default {
            registries.set_default(text)?;
        }
        Ok(registries)
    }

    /// Sets the registry of names without a host: `HOST` or `HOST/PATH`.
    pub fn set_default(&mut self, text: &str) -> Result<(), RegistriesError> {
        let (host, path) = match text.split_once('/') {
            Some((host, path)) => (host, Some(path)),
            None => (text, None),
        };
        // The rest must be able to stand in a name.
        let tried: Result<ImageName, _> = format!("a:1/{}", path.unwrap_or("x")).parse();
        if !host_is_valid(host) || tried.is_err() || path.is_some_and(|p| p.contains([':', '@'])) {
            return Err(bad_host(text));
        }
        self.default = Some(DefaultRegistry {
            host: host.to_owned(),
            path: path.map(str::to_owned),
        });
        Ok(())
    }

    pub fn auth_file(&self) -> Option<&Path> {
        self.auth_file.as_deref()
    }

    /// Files that the configuration names.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let certificates = self.entries.iter().filter_map(|entry| entry.ca.as_deref());
        self.auth_file.as_deref().into_iter().chain(certificates)
    }

    /// The name with the host that it means, and a tag or digest.
    pub fn complete(&self, name: &ImageName) -> Result<ImageName, RegistriesError> {
        let mut full = name.clone();
        if full.tag.is_none() && full.digest.is_none() {
            full.tag = Some(crate::name::LATEST.to_owned());
        }
        if full.host.is_none() {
            let default = self
                .default
                .as_ref()
                .ok_or_else(|| RegistriesError::NoDefault {
                    name: name.to_string(),
                })?;
            full.host = Some(default.host.clone());
            if let Some(path) = default.path.as_ref().filter(|_| !full.path.contains('/')) {
                full.path = format!("{path}/{}", full.path);
            }
        }
        Ok(full)
    }

    /// The places to ask for a complete name, in order.
    pub fn endpoints(&self, name: &ImageName) -> Result<Vec<Endpoint>, RegistriesError> {
        let full = self.complete(name)?;
        let host = full.host.unwrap_or_default();
        let entry = self.entries.iter().find(|entry| entry.host == host);
        if entry.is_none() && self.only_listed {
            return Err(RegistriesError::NotListed { host });
        }
        let mut endpoints = Vec::new();
        for mirror in entry.iter().flat_map(|entry| &entry.mirrors) {
            let (base, at, path) = split_mirror(mirror)?;
            let repository = match path {
                "" => full.path.clone(),
                path => format!("{path}/{}", full.path),
            };
            endpoints.push(Endpoint {
                base: base.to_owned(),
                host: at.to_owned(),
                repository,
                ca: entry.and_then(|entry| entry.ca.clone()),
            });
        }
        let plain = entry.is_some_and(|entry| entry.plain_http) || is_loopback(&host);
        endpoints.push(Endpoint {
            base: format!("{}://{host}", if plain { "http" } else { "https" }),
            host,
            repository: full.path,
            ca: entry.and_then(|entry| entry.ca.clone()),
        });
        Ok(endpoints)
    }
}

fn bad_host(text: &str) -> RegistriesError {
    RegistriesError::Host {
        text: text.chars().take(200).collect(),
    }
}

/// Base URL, host and path of a mirror.
fn split_mirror(text: &str) -> Result<(&str, &str, &str), RegistriesError> {
    let bad = || RegistriesError::Mirror {
        text: text.chars().take(200).collect(),
    };
    let rest = text
        .strip_prefix("https://")
        .or_else(|| text.strip_prefix("http://"))
        .ok_or_else(bad)?;
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    if !host_is_valid(host) || path.contains(['?', '#', '@', ':']) {
        return Err(bad());
    }
    let base = text
        .get(..text.len() - rest.len() + host.len())
        .unwrap_or(text);
    Ok((base, host, path.trim_end_matches('/')))
}

/// Whether a host with an optional port is this machine.
pub(crate) fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(rest),
        None => host.split(':').next().unwrap_or(host),
    };
    name == "localhost"
        || name
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Registries, RegistriesError> {
        Registries::parse(text, Path::new("registries.toml"))
    }

    fn bases(registries: &Registries, name: &str) -> Vec<String> {
        let all = registries.endpoints(&name.parse().unwrap()).unwrap();
        all.into_iter()
            .map(|one| format!("{} {}", one.base, one.repository))
            .collect()
    }

    #[test]
    fn a_short_name_needs_a_default() {
        let mut registries = Registries::default();
        let name: ImageName = "python:3-slim".parse().unwrap();
        let error = registries.complete(&name).unwrap_err();
        assert!(matches!(error, RegistriesError::NoDefault { .. }));
        registries.set_default("registry.example/library").unwrap();
        let full = |text: &str| {
            let name: ImageName = text.parse().unwrap();
            registries.complete(&name).unwrap().to_string()
        };
        assert_eq!(full("python"), "registry.example/library/python:latest");
        assert_eq!(full("team/app:1"), "registry.example/team/app:1");
        assert_eq!(full("other.example/app:1"), "other.example/app:1");
    }

    #[test]
    fn mirrors_come_first_and_http_is_for_loopback_or_on_request() {
        let registries = parse(
            "schema = 1\n[[registry]]\nhost = \"registry.example\"\n\
             mirrors = [\"http://10.0.0.5:5000\", \"https://mirror.example/cache\"]\n\
             [[registry]]\nhost = \"plain.example:80\"\nplain_http = true\n",
        )
        .unwrap();
        assert_eq!(
            bases(&registries, "registry.example/a/b:1"),
            [
                "http://10.0.0.5:5000 a/b",
                "https://mirror.example cache/a/b",
                "https://registry.example a/b"
            ]
        );
        assert_eq!(
            bases(&registries, "plain.example:80/a"),
            ["http://plain.example:80 a"]
        );
        assert_eq!(
            bases(&registries, "127.0.0.1:5000/a"),
            ["http://127.0.0.1:5000 a"]
        );
        assert_eq!(
            bases(&registries, "10.0.0.7:5000/a"),
            ["https://10.0.0.7:5000 a"]
        );
    }

    #[test]
    fn unlisted_registries_can_be_refused() {
        let registries = parse("schema = 1\nonly_listed = true\n").unwrap();
        let error = registries.endpoints(&"a.example/b".parse().unwrap());
        assert!(matches!(error, Err(RegistriesError::NotListed { .. })));
    }

    #[test]
    fn a_bad_file_is_refused_with_the_reason() {
        for text in [
            "schema = 2\n",
            "schema = 1\nextra = 1\n",
            "schema = 1\ndefault = \"a b\"\n",
            "schema = 1\ndefault = \"host/UPPER\"\n",
            "schema = 1\n[[registry]]\nhost = \"a/b\"\n",
            "schema = 1\n[[registry]]\nhost = \"a\"\nmirrors = [\"ftp://x\"]\n",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
