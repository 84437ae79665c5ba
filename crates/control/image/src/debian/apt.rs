//! A private apt.
//!
//! Its lists, cache and configuration lie in the forkd cache, so nothing on the host changes. Every download
//! passes apt's verification: indexes are checked against Debian's keys, packages against the indexes.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::mirror::Mirror;
use super::{DebianError, KEYRING, classify};
use crate::cache::{Cache, CacheError, write_atomically};
use crate::progress::Progress;
use crate::tools;

/// Settings of the host's apt that describe how to reach a mirror. All other host settings, hooks above all,
/// are ignored.
const REACH: [&str; 6] = [
    "Acquire::http::",
    "Acquire::https::",
    "Acquire::Retries",
    "Acquire::ForceIPv",
    "Acquire::Check-Valid-Until",
    "Acquire::Check-Date",
];

/// A private apt. It is locked for this process until the value is dropped.
#[derive(Debug)]
pub struct Apt {
    folder: PathBuf,
    _lock: File,
}

/// A package of the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Package {
    pub name: String,
    pub version: String,
    /// SHA-256 of the package file, from the signed index.
    pub sha256: String,
    depends: String,
}

/// The path of Debian's keys, if the file exists.
pub fn keyring() -> Result<&'static Path, DebianError> {
    let path = Path::new(KEYRING);
    if path.exists() {
        Ok(path)
    } else {
        Err(DebianError::NoKeyring {
            path: path.to_owned(),
        })
    }
}

/// The host's settings for reaching mirrors, such as proxies, as lines of an apt configuration.
pub fn reach_settings() -> Result<String, DebianError> {
    let mut command = Command::new("apt-config");
    command
        .env_remove("APT_CONFIG")
        .args(["dump", "--format", "%F \"%v\";%n"]);
    let text = tools::output(&mut command)?;
    Ok(text
        .lines()
        .filter(|line| REACH.iter().any(|key| line.starts_with(key)))
        .filter(|line| !line.ends_with(" \"\";"))
        .map(|line| format!("{line}\n"))
        .collect())
}

impl Apt {
    /// Sets up the private apt and fetches the signed indexes of the mirror.
    pub fn update(
        cache: &Cache,
        mirror: &Mirror,
        progress: &Progress,
    ) -> Result<Self, DebianError> {
        let lock = cache.lock("apt/lock", progress)?;
        let apt = Self {
            folder: cache.root().join("apt"),
            _lock: lock,
        };
        apt.configure(mirror)?;
        let step = progress.step("fetching Debian's package index");
        let mut command = apt.command("apt-get");
        command.args(["update", "--error-on=any", "-q"]);
        tools::output(&mut command).map_err(|error| classify(error, &apt.folder))?;
        step.done("");
        Ok(apt)
    }

    fn configure(&self, mirror: &Mirror) -> Result<(), DebianError> {
        let keyring = keyring()?;
        for folder in [
            "etc/apt/apt.conf.d",
            "etc/apt/preferences.d",
            "etc/apt/sources.list.d",
            "etc/apt/trusted.gpg.d",
            "var/lib/apt/lists/partial",
            "var/cache/apt/archives/partial",
            "var/lib/dpkg",
        ] {
            let path = self.folder.join(folder);
            std::fs::create_dir_all(&path).map_err(CacheError::io("make the folder", &path))?;
        }
        let conf = format!(
            "Dir \"{}\";\n\
             Dir::Etc::netrc \"/etc/apt/auth.conf\";\n\
             Dir::Etc::netrcparts \"/etc/apt/auth.conf.d\";\n\
             APT::Architecture \"amd64\";\n\
             APT::Architectures {{ \"amd64\"; }};\n\
             APT::Sandbox::User \"\";\n\
             Acquire::Languages \"none\";\n\
             {}",
            self.folder.display(),
            reach_settings()?
        );
        let mut sources = mirror.sources(keyring).join("\n");
        sources.push('\n');
        for (name, content) in [
            ("apt.conf", conf.as_str()),
            ("etc/apt/sources.list", &sources),
            ("var/lib/dpkg/status", ""),
        ] {
            write_atomically(&self.folder.join(name), content.as_bytes())?;
        }
        Ok(())
    }

    fn command(&self, program: &str) -> Command {
        let mut command = tools::bound_to_us(program);
        command.env("APT_CONFIG", self.folder.join("apt.conf"));
        command
    }

    /// Looks up a package in the index.
    pub fn show(&self, name: &str) -> Result<Package, DebianError> {
        let mut command = self.command("apt-cache");
        command.args(["show", "--no-all-versions", "--", name]);
        let text = tools::output(&mut command).map_err(|error| {
            if error.tail().contains("No packages found") {
                DebianError::NoPackage {
                    package: name.to_owned(),
                }
            } else {
                classify(error, &self.folder)
            }
        })?;
        parse_record(name, &text)
    }

    /// Downloads a package into a folder. apt checks it against the signed index.
    pub fn download(&self, package: &Package, to: &Path) -> Result<PathBuf, DebianError> {
        let mut command = self.command("apt-get");
        command.current_dir(to).args([
            "download",
            "-q",
            &format!("{}={}", package.name, package.version),
        ]);
        tools::output(&mut command).map_err(|error| classify(error, to))?;
        let entries = std::fs::read_dir(to).map_err(CacheError::io("read", to))?;
        entries
            .filter_map(|entry| entry.ok().map(|entry| entry.path()))
            .find(|path| path.extension().is_some_and(|ext| ext == "deb"))
            .ok_or(DebianError::OddPackage {
                package: package.name.clone(),
                what: "names a file that was not downloaded",
            })
    }
}

impl Package {
    /// The first dependency whose name starts with `prefix`.
    pub fn dependency(&self, prefix: &str) -> Result<&str, DebianError> {
        self.depends
            .split([',', '|'])
            .filter_map(|item| item.split_whitespace().next())
            .find(|name| name.starts_with(prefix))
            .ok_or(DebianError::OddPackage {
                package: self.name.clone(),
                what: "depends on no kernel image",
            })
    }
}

/// Unpacks the files of a package into a folder.
pub fn unpack(deb: &Path, to: &Path) -> Result<(), DebianError> {
    let mut command = tools::bound_to_us("dpkg-deb");
    command.arg("-x").arg(deb).arg(to);
    tools::output(&mut command).map_err(|error| classify(error, to))?;
    Ok(())
}

fn parse_record(name: &str, text: &str) -> Result<Package, DebianError> {
    let field = |key: &str| {
        text.lines()
            .take_while(|line| !line.is_empty())
            .find_map(|line| line.strip_prefix(key)?.strip_prefix(": "))
            .map(str::to_owned)
    };
    let odd = |what| DebianError::OddPackage {
        package: name.to_owned(),
        what,
    };
    Ok(Package {
        name: name.to_owned(),
        version: field("Version").ok_or_else(|| odd("has no version"))?,
        sha256: field("SHA256").ok_or_else(|| odd("has no SHA-256"))?,
        depends: field("Depends").unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD: &str = "Package: linux-image-cloud-amd64\nVersion: 6.12.1-1\n\
        Depends: kmod, linux-image-6.12.1-cloud-amd64 (= 6.12.1-1)\nSHA256: abc\n\n\
        Package: other\nVersion: 9\n";

    #[test]
    fn a_record_is_read() {
        let package = parse_record("linux-image-cloud-amd64", RECORD).unwrap();
        assert_eq!(package.version, "6.12.1-1");
        assert_eq!(
            package.dependency("linux-image-").unwrap(),
            "linux-image-6.12.1-cloud-amd64"
        );
        assert!(package.dependency("grub").is_err());
    }

    #[test]
    fn a_record_without_a_digest_is_refused() {
        let error = parse_record("x", "Package: x\nVersion: 1\n").unwrap_err();
        assert!(error.to_string().contains("SHA-256"), "{error}");
    }
}
