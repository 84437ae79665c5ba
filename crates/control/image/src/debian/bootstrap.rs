//! Builds a root from Debian's packages with mmdebstrap.
//!
//! The result is a tar archive. The build mounts nothing and works with and without root privileges.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use thiserror::Error;

use super::mirror::MirrorChoice;
use super::{DebianError, apt, classify};
use crate::cache::{Cache, CacheError, Key, Kind, write_atomically};
use crate::digest;
use crate::kernel::Kernel;
use crate::progress::Progress;
use crate::recipe::{Recipe, Variant};
use crate::root::tar::TarError;
use crate::root::{ImageSource, PackageRecord, Root, RootError, RootSource, RunDefaults, tar};
use crate::tools;

/// Paths that no guest reads. Copyright files stay, because the licences demand it.
const LEFT_OUT: [&str; 7] = [
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/lintian/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/bug/*",
];

/// The archive in its folder of the cache, and the file with the time at which it was begun.
const ARCHIVE: &str = "root.tar";
const START: &str = "start";
/// Archives that stay in the cache.
const KEPT_ROOTS: usize = 8;

/// Why a root could not be built.
#[derive(Debug, Error)]
pub enum BootstrapError {
    #[error("Debian's packages could not be installed into the image")]
    Debian(#[from] DebianError),
    #[error("the result of the installation cannot be used")]
    Tar(#[from] TarError),
    #[error("the cache of installed packages cannot be used")]
    Cache(#[from] CacheError),
    #[error("the image has no list of its packages")]
    NoPackages(#[source] io::Error),
}

/// Debian's packages as a source of roots.
#[derive(Debug)]
pub struct DebianRoot<'a> {
    pub recipe: &'a Recipe,
    /// The Debian release.
    pub suite: &'a str,
    pub variant: Variant,
    /// The cache that keeps packages between builds.
    pub cache: &'a Cache,
    /// The mirror for new packages.
    pub mirror: &'a MirrorChoice,
    /// A kernel whose modules are added.
    pub kernel: Option<&'a Kernel>,
    /// Install the mirror's current packages, even if the cache has an archive with these packages.
    pub refresh: bool,
}

impl RootSource for DebianRoot<'_> {
    fn fingerprint(&self) -> Vec<u8> {
        let kernel = self.kernel.map(|kernel| &kernel.record);
        let recipe = self.recipe.fingerprint();
        serde_json::json!([LEFT_OUT, kernel, String::from_utf8_lossy(&recipe)])
            .to_string()
            .into_bytes()
    }

    fn fetch(&self, work: &Path, progress: &Progress) -> Result<Root, RootError> {
        Ok(self.make(work, progress)?)
    }
}

impl DebianRoot<'_> {
    fn make(&self, work: &Path, progress: &Progress) -> Result<Root, BootstrapError> {
        let (archive, start) = self.archive(work, progress)?;
        let mut tree = tar::read(&archive)?;
        tree.clamp_times(start);
        let status = tree
            .read("var/lib/dpkg/status")
            .map_err(BootstrapError::NoPackages)?;
        Ok(Root {
            tree,
            packages: installed(&String::from_utf8_lossy(&status)),
            source: ImageSource::Debian {
                suite: self.suite.to_owned(),
                variant: self.variant,
            },
            kernel: self.kernel.map(|kernel| kernel.record.version.clone()),
            env: BTreeMap::new(),
            run: RunDefaults::default(),
        })
    }

    /// The archive with the installed packages, and the time at which the installation began. It stays in the cache:
    /// a recipe that changes nothing but its files or services does not install anything again.
    fn archive(&self, work: &Path, progress: &Progress) -> Result<(PathBuf, i64), BootstrapError> {
        let kernel = self.kernel.map(|kernel| &kernel.record);
        let about = serde_json::json!([
            LEFT_OUT,
            kernel,
            self.suite,
            self.variant,
            self.recipe.packages
        ]);
        let question = Key::new(self.suite, &[about.to_string().as_bytes()]);
        let folder = self.cache.answer::<BootstrapError>(
            Kind::Root,
            &question,
            self.refresh,
            progress,
            |staging| {
                let start = SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .map_or(0, |time| time.as_secs() as i64);
                let step = progress.step(&format!(
                    "bootstrapping Debian {} for {}",
                    self.suite, self.recipe.name
                ));
                let archive = staging.join(ARCHIVE);
                self.bootstrap(work, &archive, &mut |line| {
                    if let Some(line) = line.strip_prefix("I: ").filter(|line| is_news(line)) {
                        step.note(line);
                    }
                })?;
                self.keep_packages(work)?;
                let path = staging.join(START);
                std::fs::write(&path, start.to_string()).map_err(CacheError::io("write", &path))?;
                let digest = digest::of_file(&archive).map_err(CacheError::io("read", &archive))?;
                step.done(&format!("{} MiB", digest.size >> 20));
                Ok(Key::new(self.suite, &[&digest.digest.0]))
            },
        )?;
        self.cache.keep_newest(Kind::Root, KEPT_ROOTS, &folder)?;
        let path = folder.join(START);
        let start = std::fs::read_to_string(&path).map_err(CacheError::io("read", &path))?;
        Ok((folder.join(ARCHIVE), start.trim().parse().unwrap_or(0)))
    }

    fn bootstrap(
        &self,
        work: &Path,
        archive: &Path,
        line: &mut dyn FnMut(&str),
    ) -> Result<(), DebianError> {
        let settings = work.join("apt.conf");
        let text = format!("{}Acquire::Languages \"none\";\n", apt::reach_settings()?);
        write_atomically(&settings, text.as_bytes())?;
        let (pool, fresh) = (self.pool()?, work.join("debs"));
        make_folder(&fresh)?;
        let mut command = tools::bound_to_us("mmdebstrap");
        // Its own working folder goes where a killed build is cleaned up.
        command.env("TMPDIR", work);
        command.args([
            "--format=tar".to_owned(),
            "--architectures=amd64".to_owned(),
            format!("--variant={}", self.variant.name()),
            format!("--include={}", self.recipe.packages.join(",")),
            format!("--aptopt={}", settings.display()),
            "--skip=essential/unlink".to_owned(),
            "--setup-hook=mkdir -p \"$1/var/cache/apt/archives\"".to_owned(),
            format!(
                "--setup-hook=sync-in {} /var/cache/apt/archives",
                quoted(&pool)
            ),
            format!(
                "--customize-hook=sync-out /var/cache/apt/archives {}",
                quoted(&fresh)
            ),
        ]);
        // A build that dies is thrown away: nothing in it has to survive a crash.
        command.arg("--dpkgopt=force-unsafe-io");
        for option in LEFT_OUT {
            command.arg(format!("--dpkgopt={option}"));
        }
        if let Some(kernel) = self.kernel {
            let modules = kernel.folder.join("modules");
            let version = &kernel.record.version;
            command.args([
                format!("--customize-hook=mkdir -p \"$1/usr/lib/modules/{version}\""),
                format!(
                    "--customize-hook=sync-in {} /usr/lib/modules/{version}",
                    quoted(&modules)
                ),
                format!("--customize-hook=chroot \"$1\" depmod {version}"),
            ]);
        }
        command.arg(self.suite).arg(archive);
        command.args(self.mirror.resolve()?.sources(apt::keyring()?));
        tools::output_with(&mut command, line).map_err(|error| classify(error, work))?;
        Ok(())
    }

    fn pool(&self) -> Result<PathBuf, DebianError> {
        let pool = self.cache.root().join("debs");
        make_folder(&pool)?;
        Ok(pool)
    }

    /// Moves downloaded packages to the cache for the next build. apt checks them against the signed index
    /// each time, so a damaged package is downloaded again.
    fn keep_packages(&self, work: &Path) -> Result<(), DebianError> {
        let pool = self.pool()?;
        let fresh = work.join("debs");
        for entry in std::fs::read_dir(&fresh).map_err(CacheError::io("read", &fresh))? {
            let path = entry.map_err(CacheError::io("read", &fresh))?.path();
            let is_package = path.extension().is_some_and(|ext| ext == "deb");
            if let Some(name) = path.file_name().filter(|_| is_package) {
                let kept = pool.join(name);
                std::fs::rename(&path, &kept).map_err(CacheError::io("write", &kept))?;
            }
        }
        Ok(())
    }
}

/// Lines of mmdebstrap that announce a slow step; all others are hidden.
fn is_news(line: &str) -> bool {
    [
        "downloading",
        "extracting",
        "installing",
        "creating tarball",
    ]
    .iter()
    .any(|word| line.starts_with(word))
}

fn make_folder(path: &Path) -> Result<(), DebianError> {
    std::fs::create_dir_all(path).map_err(CacheError::io("make the folder", path))?;
    Ok(())
}

/// Quotes a path for a hook, which mmdebstrap splits like a shell.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', "'\\''"))
}

/// The installed packages in dpkg's status file.
fn installed(status: &str) -> Vec<PackageRecord> {
    let mut packages = Vec::new();
    for record in status.split("\n\n") {
        let field = |key: &str| {
            record
                .lines()
                .find_map(|line| line.strip_prefix(key)?.strip_prefix(": "))
        };
        let installed = field("Status").is_some_and(|status| status.ends_with(" installed"));
        if let (true, Some(name), Some(version)) = (installed, field("Package"), field("Version")) {
            packages.push(PackageRecord {
                name: name.to_owned(),
                version: version.to_owned(),
            });
        }
    }
    packages.sort();
    packages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_installed_packages_are_listed() {
        let status = "Package: zlib1g\nStatus: install ok installed\nVersion: 1:1.3\n\n\
            Package: gone\nStatus: deinstall ok config-files\nVersion: 2\n\n\
            Package: bash\nStatus: install ok installed\nDepends: x\nVersion: 5.2\n";
        let names: Vec<_> = installed(status)
            .into_iter()
            .map(|package| format!("{} {}", package.name, package.version))
            .collect();
        assert_eq!(names, ["bash 5.2", "zlib1g 1:1.3"]);
    }

    #[test]
    fn paths_are_one_word() {
        assert_eq!(quoted(Path::new("/a b/it's")), "'/a b/it'\\''s'");
    }
}
