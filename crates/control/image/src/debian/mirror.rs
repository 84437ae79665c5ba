//! Finds a Debian mirror.
//!
//! The order is `--mirror`, the sources of the host's apt with the suite replaced by [`SUITE`],
//! and the mirror that mmdebstrap knows. [`MirrorChoice`] is resolved late: a build from the cache needs no
//! mirror.

use std::path::Path;
use std::process::Command;

use super::{DebianError, KEYRING, SUITE};
use crate::tools;

/// Names of Debian's releases in a host's sources.
const RELEASES: [&str; 11] = [
    "bullseye",
    "bookworm",
    "trixie",
    "forky",
    "duke",
    "sid",
    "stable",
    "oldstable",
    "oldoldstable",
    "testing",
    "unstable",
];

/// One archive: an address and a suite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Archive {
    pub uri: String,
    /// For example `trixie-security`.
    pub suite: String,
}

/// The archives that packages come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mirror {
    archives: Vec<Archive>,
}

/// Which mirror to use. Resolved only if something is missing from the cache.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum MirrorChoice {
    /// The mirror of the host's apt.
    #[default]
    Host,
    /// The mirror that the user named.
    Given(Mirror),
}

impl MirrorChoice {
    /// Finds the mirror.
    pub fn resolve(&self) -> Result<Mirror, DebianError> {
        match self {
            Self::Host => Mirror::of_host(),
            Self::Given(mirror) => Ok(mirror.clone()),
        }
    }
}

impl Mirror {
    /// Parses the address that the user gave.
    pub fn given(text: &str) -> Result<Self, DebianError> {
        let known = ["http://", "https://", "file:", "mirror+file:"];
        let odd = text.contains(|c: char| c.is_whitespace() || c.is_control() || c == '[');
        if odd || !known.iter().any(|scheme| text.starts_with(scheme)) {
            return Err(DebianError::BadMirror {
                text: text.to_owned(),
            });
        }
        let uri = text.trim_end_matches('/').to_owned();
        let archives = [SUITE.to_owned(), format!("{SUITE}-updates")]
            .map(|suite| Archive {
                uri: uri.clone(),
                suite,
            })
            .into();
        Ok(Self { archives })
    }

    /// The mirror of the host's apt, or the one that mmdebstrap knows.
    pub fn of_host() -> Result<Self, DebianError> {
        let mut apt = Command::new("apt-get");
        apt.env_remove("APT_CONFIG").args([
            "indextargets",
            "--format",
            "$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)",
            "Created-By: Packages",
        ]);
        let archives = from_index_targets(&tools::output(&mut apt)?);
        if archives.iter().any(|archive| archive.suite == SUITE) {
            return Ok(Self { archives });
        }
        let archives = from_source_lines(&mmdebstrap_default());
        if archives.iter().any(|archive| archive.suite == SUITE) {
            return Ok(Self { archives });
        }
        Err(DebianError::NoMirror)
    }

    /// Lines of a `sources.list`, each bound to Debian's keys.
    pub fn sources(&self, keyring: &Path) -> Vec<String> {
        self.archives
            .iter()
            .map(|Archive { uri, suite }| {
                format!("deb [signed-by={}] {uri} {suite} main", keyring.display())
            })
            .collect()
    }
}

/// Translates a suite of the host to ours: `bookworm-security` becomes `trixie-security`.
fn translate(suite: &str) -> Option<String> {
    let (release, pocket) = match suite.split_once(['-', '/']) {
        Some((release, pocket)) => (release, format!("-{pocket}")),
        None => (suite, String::new()),
    };
    let wanted = matches!(pocket.as_str(), "" | "-updates" | "-security");
    (wanted && RELEASES.contains(&release)).then(|| format!("{SUITE}{pocket}"))
}

/// Parses the output of `apt-get indextargets`. Other distributions publish suites with Debian's names, so an
/// index that the host has fetched must have the origin Debian.
fn from_index_targets(text: &str) -> Vec<Archive> {
    let mut archives: Vec<Archive> = Vec::new();
    for line in text.lines() {
        let mut words = line.splitn(4, ' ');
        let (Some(uri), Some(suite), Some("main")) = (words.next(), words.next(), words.next())
        else {
            continue;
        };
        let origin = words.next().unwrap_or_default();
        let fetched = !origin.is_empty() && !origin.contains("$(");
        let path_says_debian = uri.trim_end_matches('/').contains("debian");
        if (fetched && origin != "Debian") || (!fetched && !path_says_debian) {
            continue;
        }
        add(&mut archives, uri, suite);
    }
    archives
}

/// Parses lines of the form `deb [options] uri suite component…`.
fn from_source_lines(text: &str) -> Vec<Archive> {
    let mut archives = Vec::new();
    for line in text.lines() {
        let Some(rest) = line.trim().strip_prefix("deb ") else {
            continue;
        };
        let rest = match rest.trim_start().strip_prefix('[') {
            Some(options) => options.split_once(']').map_or("", |(_, rest)| rest),
            None => rest,
        };
        let mut words = rest.split_whitespace();
        if let (Some(uri), Some(suite)) = (words.next(), words.next()) {
            add(&mut archives, uri, suite);
        }
    }
    archives
}

fn add(archives: &mut Vec<Archive>, uri: &str, suite: &str) {
    let Some(suite) = translate(suite) else {
        return;
    };
    if uri.starts_with("cdrom:") || archives.iter().any(|known| known.suite == suite) {
        return;
    }
    archives.push(Archive {
        uri: uri.trim_end_matches('/').to_owned(),
        suite,
    });
}

/// The sources that mmdebstrap writes by itself, for hosts whose apt knows another distribution. mmdebstrap
/// writes them before its set-up hook runs; the hook prints them and stops mmdebstrap.
fn mmdebstrap_default() -> String {
    let mut command = Command::new("mmdebstrap");
    command.args([
        "--variant=custom",
        &format!("--keyring={KEYRING}"),
        "--setup-hook=cat \"$1/etc/apt/sources.list\" >&2; exit 1",
        SUITE,
        "/dev/null",
    ]);
    let mut text = String::new();
    // It fails by design, and when it cannot run there is no default.
    let _ = tools::output_with(&mut command, &mut |line| {
        text.push_str(line);
        text.push('\n');
    });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(archives: &[Archive]) -> Vec<(&str, &str)> {
        archives
            .iter()
            .map(|archive| (archive.uri.as_str(), archive.suite.as_str()))
            .collect()
    }

    #[test]
    fn the_hosts_archives_are_translated() {
        let text = "http://m.example/debian/ bookworm main Debian\n\
            http://m.example/debian/ bookworm non-free Debian\n\
            http://m.example/debian/ bookworm-updates main Debian\n\
            http://s.example/debian-security/ bookworm-security main Debian\n\
            http://m.example/debian/ bookworm-backports main Debian Backports\n\
            http://other.example/debian/ bookworm main Other Vendor\n\
            cdrom:[disc]/ trixie main Debian\n";
        assert_eq!(
            pairs(&from_index_targets(text)),
            [
                ("http://m.example/debian", "trixie"),
                ("http://m.example/debian", "trixie-updates"),
                ("http://s.example/debian-security", "trixie-security"),
            ]
        );
    }

    #[test]
    fn a_host_without_indexes_goes_by_the_address() {
        let text = "http://vendor.example/apt/ bookworm main $(ORIGIN)\n\
            http://m.example/debian/ bookworm main $(ORIGIN)\n";
        assert_eq!(
            pairs(&from_index_targets(text)),
            [("http://m.example/debian", "trixie")]
        );
    }

    #[test]
    fn a_host_of_another_distribution_has_none() {
        let text = "http://u.example/ubuntu/ noble main Ubuntu\n";
        assert!(from_index_targets(text).is_empty());
    }

    #[test]
    fn source_lines_are_read() {
        let text = "I: noise\ndeb [signed-by=\"/k\"] http://m.example/debian trixie main\n\
            deb http://s.example/debian-security trixie-security main\n";
        assert_eq!(
            pairs(&from_source_lines(text)),
            [
                ("http://m.example/debian", "trixie"),
                ("http://s.example/debian-security", "trixie-security"),
            ]
        );
    }

    #[test]
    fn a_given_mirror_is_checked() {
        assert!(Mirror::given("http://m.example/debian/").is_ok());
        for text in [
            "",
            "m.example",
            "http://m.example/ x",
            "http://m [trusted=yes]",
        ] {
            assert!(Mirror::given(text).is_err(), "{text:?}");
        }
        let mirror = Mirror::given("file:/srv/debian/").unwrap();
        assert_eq!(
            mirror.sources(Path::new("/keys.gpg"))[0],
            "deb [signed-by=/keys.gpg] file:/srv/debian trixie main"
        );
    }
}
