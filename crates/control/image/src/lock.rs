//! Packages of Python and Node.js that a lock file names.
//!
//! The host's own `pip` and `npm` fetch them, from the registries that the host is configured with. No code of a
//! package runs: only wheels are taken, and npm runs no scripts. Every package has a digest in the lock file, and a
//! package with another content is refused. The installed files stay in the cache under the digest of the lock file.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;
use serde_json::{Value, json};
use thiserror::Error;

use crate::cache::{Cache, CacheError, Key, Kind};
use crate::progress::Progress;
use crate::recipe::{Lock, LockKind};
use crate::root::Root;
use crate::root::tar::{self, TarError};
use crate::tools::{self, ToolError};

/// Raised when the same lock file would become other files.
const LAYOUT: &[u8] = b"lock 1";
/// The versions of glibc below that of the guests, as wheels name them.
const GLIBC: std::ops::RangeInclusive<u32> = 17..=41;
const MAX_PACKAGES: usize = 4096;
/// Programs of packages.
const PROGRAMS: &str = "usr/local/bin";

/// Why the packages of a lock file could not be installed.
#[derive(Debug, Error)]
pub enum LockError {
    #[error("the packages of Python could not be fetched")]
    Pip(#[source] ToolError),
    #[error("the packages of Node.js could not be fetched")]
    Npm(#[source] ToolError),
    #[error("cannot {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the packages cannot be added to the image")]
    Tar(#[from] TarError),
    #[error("the cache of packages cannot be used")]
    Cache(#[from] CacheError),
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LockError {
    let path = path.to_owned();
    move |source| LockError::Io {
        action,
        path,
        source,
    }
}

/// Checks a requirements file of pip: `NAME==VERSION --hash=sha256:…`, with comments and continued lines. Options are
/// refused: one could name a registry or a file of the host.
pub fn check_requirements(text: &str) -> Result<(), String> {
    let joined = text.replace("\\\n", " ");
    let mut count = 0;
    for line in joined.lines() {
        let line = line.split(" #").next().unwrap_or(line).trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let mut words = line.split_ascii_whitespace();
        let package = words.next().unwrap_or_default();
        let shown: String = package.chars().take(80).collect();
        let (name, version) = package
            .split_once("==")
            .ok_or_else(|| format!("has {shown:?}, which is not NAME==VERSION"))?;
        let plain = |text: &str, more: &[u8]| {
            let byte = |b: u8| b.is_ascii_alphanumeric() || more.contains(&b);
            !text.is_empty() && !text.starts_with('-') && text.bytes().all(byte)
        };
        if !plain(name, b"-_.") || !plain(version, b"-_.+!") {
            return Err(format!("has {shown:?}, which is not NAME==VERSION"));
        }
        let mut hashes = 0;
        for word in words {
            let digest = word.strip_prefix("--hash=sha256:").unwrap_or_default();
            if digest.len() != 64 || !digest.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(format!(
                    "has something other than --hash=sha256:… after {shown:?}"
                ));
            }
            hashes += 1;
        }
        if hashes == 0 {
            return Err(format!("has no --hash=sha256:… for {shown:?}"));
        }
        count += 1;
    }
    match count {
        0 => Err("names no package".into()),
        1..=MAX_PACKAGES => Ok(()),
        _ => Err(format!("names more than {MAX_PACKAGES} packages")),
    }
}

/// The parts of `package-lock.json` that are looked at.
#[derive(Debug, Deserialize)]
struct PackageLock {
    #[serde(rename = "lockfileVersion")]
    version: u32,
    packages: BTreeMap<String, LockedPackage>,
}

#[derive(Debug, Deserialize)]
struct LockedPackage {
    integrity: Option<String>,
    #[serde(default)]
    link: bool,
    resolved: Option<String>,
}

/// Checks a `package-lock.json`: every package has its digest, and none comes from a place of its own.
pub fn check_package_lock(text: &str) -> Result<(), String> {
    let lock: PackageLock = serde_json::from_str(text)
        .map_err(|error| format!("is not a package-lock.json: {error}"))?;
    if lock.version != 3 {
        return Err(format!(
            "has lockfileVersion {}, and 3 is needed",
            lock.version
        ));
    }
    if lock.packages.len() > MAX_PACKAGES {
        return Err(format!("names more than {MAX_PACKAGES} packages"));
    }
    let mut count = 0;
    for (path, package) in lock.packages.iter().filter(|(path, _)| !path.is_empty()) {
        let shown: String = path.chars().take(120).collect();
        if !path.starts_with("node_modules/") || path.split('/').any(|part| part == "..") {
            return Err(format!("has {shown:?}, which is not below node_modules"));
        }
        if package.link || package.resolved.is_some() {
            return Err(format!(
                "names a place for {shown:?}; write the file with npm install --omit-lockfile-registry-resolved"
            ));
        }
        let pinned = package.integrity.as_deref();
        if !pinned.is_some_and(|text| text.starts_with("sha512-")) {
            return Err(format!("has no sha512 digest for {shown:?}"));
        }
        count += 1;
    }
    if count == 0 {
        return Err("names no package".into());
    }
    Ok(())
}

/// Adds the packages of a lock file to a root. The tree refers to files in `work`.
pub fn install(
    lock: &Lock,
    root: &mut Root,
    work: &Path,
    cache: &Cache,
    progress: &Progress,
) -> Result<(), LockError> {
    let folder = fetched(lock, cache, progress)?;
    let name = match lock.kind {
        LockKind::Python => "python.tar",
        LockKind::Node => "node.tar",
    };
    let archive = work.join(name);
    pack(lock, &folder, &archive).map_err(io_error("write", &archive))?;
    tar::read_into(&mut root.tree, &archive)?;
    Ok(())
}

/// The folder with the installed packages, in the cache.
fn fetched(lock: &Lock, cache: &Cache, progress: &Progress) -> Result<PathBuf, LockError> {
    let version = lock.version.as_deref().unwrap_or_default();
    let (name, kind): (_, &[u8]) = match lock.kind {
        LockKind::Python => ("python", b"python"),
        LockKind::Node => ("node", b"node"),
    };
    let key = Key::new(
        name,
        &[LAYOUT, kind, version.as_bytes(), lock.text.as_bytes()],
    );
    cache.content(Kind::Packages, &key, progress, |folder| {
        let step = progress.step(&format!("fetching the packages of {name}"));
        match lock.kind {
            LockKind::Python => pip(&lock.text, version, folder)?,
            LockKind::Node => npm(&lock.text, folder)?,
        }
        step.done("done");
        Ok(())
    })
}

fn pip(text: &str, version: &str, folder: &Path) -> Result<(), LockError> {
    let requirements = folder.join("requirements.lock");
    fs::write(&requirements, text).map_err(io_error("write", &requirements))?;
    let mut command = tools::bound_to_us("python3");
    command.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]);
    command.args([
        "--no-deps",
        "--require-hashes",
        "--only-binary=:all:",
        "--no-compile",
    ]);
    command.args(["--implementation", "cp", "--python-version", version]);
    for minor in GLIBC {
        command.args([
            "--platform".to_owned(),
            format!("manylinux_2_{minor}_x86_64"),
        ]);
    }
    command.args(["--platform", "manylinux2014_x86_64", "--target"]);
    command
        .arg(folder.join("tree"))
        .arg("--requirement")
        .arg(&requirements);
    tools::output(&mut command).map_err(LockError::Pip)?;
    repair_programs(&folder.join("tree/bin")).map_err(io_error("repair", &folder.join("tree/bin")))
}

/// The first line of a program names the Python of the host. The guest has another one.
fn repair_programs(bin: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(bin) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let path = entry?.path();
        let content = fs::read(&path)?;
        let Some(end) = content.iter().position(|byte| *byte == b'\n') else {
            continue;
        };
        let (first, rest) = content.split_at(end);
        if first.starts_with(b"#!") && first.windows(6).any(|part| part == b"python") {
            let mut file = File::create(&path)?;
            file.write_all(b"#!/usr/bin/python3")?;
            file.write_all(rest)?;
        }
    }
    Ok(())
}

fn npm(text: &str, folder: &Path) -> Result<(), LockError> {
    let tree = folder.join("tree");
    fs::create_dir(&tree).map_err(io_error("make the folder", &tree))?;
    let lock = tree.join("package-lock.json");
    fs::write(&lock, text).map_err(io_error("write", &lock))?;
    // The lock file has everything that npm compares with this file.
    let root: Value = serde_json::from_str(text).unwrap_or_default();
    let about = root["packages"][""]
        .as_object()
        .cloned()
        .unwrap_or_default();
    let manifest = tree.join("package.json");
    fs::write(&manifest, json!(about).to_string()).map_err(io_error("write", &manifest))?;
    let mut command = tools::bound_to_us("npm");
    command.args([
        "ci",
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        "--omit=dev",
    ]);
    command.args(["--loglevel=error", "--install-links=false"]);
    run_in(&mut command, &tree).map_err(LockError::Npm)
}

fn run_in(command: &mut Command, folder: &Path) -> Result<(), ToolError> {
    tools::output(command.current_dir(folder)).map(drop)
}

/// Packs installed files at their paths in the image. Names are sorted, and owner, time and permissions are fixed, so
/// that the same packages make the same image.
fn pack(lock: &Lock, folder: &Path, archive: &Path) -> io::Result<()> {
    let tree = folder.join("tree");
    let file = io::BufWriter::new(File::create(archive)?);
    let mut builder = ::tar::Builder::new(file);
    builder.mode(::tar::HeaderMode::Deterministic);
    builder.follow_symlinks(false);
    match lock.kind {
        LockKind::Python => {
            append(&mut builder, &tree.join("bin"), PROGRAMS, &|_| true)?;
            append(&mut builder, &tree, &lock.path, &|name| name != "bin")?;
        }
        LockKind::Node => {
            let modules = tree.join("node_modules");
            append(&mut builder, &modules, &lock.path, &|name| {
                name != ".package-lock.json"
            })?;
        }
    }
    builder.into_inner()?.flush()
}

type Archive = ::tar::Builder<io::BufWriter<File>>;

/// Adds what is in a folder. `keep` chooses among its entries by their names.
fn append(
    builder: &mut Archive,
    folder: &Path,
    at: &str,
    keep: &dyn Fn(&str) -> bool,
) -> io::Result<()> {
    let mut names = Vec::new();
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let name = entry?.file_name().into_string();
        let name = name.map_err(|_| io::Error::other("a package has a name that is not UTF-8"))?;
        names.push(name);
    }
    names.sort();
    for name in names.iter().filter(|name| keep(name)) {
        let (path, inside) = (folder.join(name), format!("{at}/{name}"));
        builder.append_path_with_name(&path, &inside)?;
        if fs::symlink_metadata(&path)?.is_dir() {
            append(builder, &path, &inside, &|_| true)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str =
        "--hash=sha256:40ca8afaac309b41a5b2e09e4e7beb1f824826b93c25697c4d74f573324fba4e";

    #[test]
    fn requirements_are_pinned_and_have_no_options() {
        check_requirements(&format!(
            "# tools\nruff==0.17.5 \\\n    {HASH} \\\n    {HASH}\n\n"
        ))
        .unwrap();
        for (text, expected) in [
            (String::new(), "names no package"),
            (format!("ruff>=1 {HASH}"), "NAME==VERSION"),
            ("ruff==1".to_owned(), "no --hash"),
            ("ruff==1 --hash=md5:00".to_owned(), "something other"),
            (format!("--index-url=x==1 {HASH}"), "NAME==VERSION"),
            (
                format!("ruff==1 {HASH} --global-option=x"),
                "something other",
            ),
            (format!("./x==1 {HASH}"), "NAME==VERSION"),
        ] {
            let problem = check_requirements(&text).unwrap_err();
            assert!(problem.contains(expected), "{text}: {problem}");
        }
    }

    #[test]
    fn a_package_lock_pins_everything_and_names_no_place() {
        let lock = |package: Value| {
            json!({"lockfileVersion": 3, "packages": {"": {}, "node_modules/x": package}})
                .to_string()
        };
        check_package_lock(&lock(json!({"version": "1", "integrity": "sha512-AA=="}))).unwrap();
        for (text, expected) in [
            (lock(json!({"version": "1"})), "no sha512"),
            (lock(json!({"integrity": "sha1-AA"})), "no sha512"),
            (
                lock(json!({"integrity": "sha512-A", "resolved": "file:/etc"})),
                "names a place",
            ),
            (lock(json!({"link": true})), "names a place"),
            (
                json!({"lockfileVersion": 3, "packages": {}}).to_string(),
                "no package",
            ),
            (
                json!({"lockfileVersion": 1, "packages": {}}).to_string(),
                "lockfileVersion 1",
            ),
            (
                json!({"lockfileVersion": 3, "packages": {"../x": {}}}).to_string(),
                "not below",
            ),
            ("x".to_owned(), "not a package-lock.json"),
        ] {
            let problem = check_package_lock(&text).unwrap_err();
            assert!(problem.contains(expected), "{text}: {problem}");
        }
    }

    #[test]
    fn installed_files_go_to_their_places_with_fixed_owners() {
        let folder = tempfile::tempdir().unwrap();
        let tree = folder.path().join("tree");
        fs::create_dir_all(tree.join("bin")).unwrap();
        fs::create_dir_all(tree.join("pkg")).unwrap();
        fs::write(tree.join("pkg/__init__.py"), "x = 1\n").unwrap();
        fs::write(tree.join("bin/tool"), "#!/opt/python3.11\nprint(1)\n").unwrap();
        repair_programs(&tree.join("bin")).unwrap();
        let lock = Lock {
            kind: LockKind::Python,
            text: String::new(),
            version: Some("3.13".into()),
            path: "usr/local/lib/python3.13/dist-packages".into(),
        };
        let archive = folder.path().join("a.tar");
        pack(&lock, folder.path(), &archive).unwrap();
        let read = tar::read(&archive).unwrap();
        let tool = read.read("usr/local/bin/tool").unwrap();
        assert_eq!(tool, b"#!/usr/bin/python3\nprint(1)\n");
        let module = format!("{}/pkg/__init__.py", lock.path);
        assert_eq!(read.read(&module).unwrap(), b"x = 1\n");
        assert!(read.get(&format!("{}/bin", lock.path)).is_none());
    }
}
