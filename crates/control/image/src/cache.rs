//! The cache: finished content under content keys, made in a staging folder and renamed into place.
//!
//! ```text
//! <root>/<kind>/<content key>/…      finished, never changed again
//! <root>/<kind>/refs/<question>.json which content answers a question, such as "recipe X"
//! <root>/<kind>/staging/…            being made; each folder is locked by the process that makes it
//! <root>/<kind>/locks/<question>     held while a process makes the answer
//! ```
//!
//! A folder at its final path is complete, because it was renamed as a whole. A staging folder without a lock belongs
//! to a process that died, and the next build removes it.

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::progress::Progress;

const REF_SCHEMA: u32 = 1;

/// Why the cache cannot be used.
#[derive(Debug, Error)]
pub enum CacheError {
    #[error("there is no cache folder: neither XDG_CACHE_HOME nor HOME is set")]
    NoFolder,
    /// A file or folder of the cache cannot be used.
    #[error("cannot {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl CacheError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}

/// The kinds of content in the cache. Each kind has a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Kernel,
    Initramfs,
    Image,
    Machine,
    /// An archive of installed Debian packages.
    Root,
    /// Installed packages of Python or Node.js.
    Packages,
}

impl Kind {
    fn folder(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Initramfs => "initramfs",
            Self::Image => "image",
            Self::Machine => "machine",
            Self::Root => "root",
            Self::Packages => "packages",
        }
    }
}

/// A name within a kind: a readable part and the start of a digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key(String);

impl Key {
    /// A key for content or for a question. The readable part is for users only.
    pub fn new(readable: &str, parts: &[&[u8]]) -> Self {
        let mut hasher = blake3::Hasher::new();
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        let readable: String = readable
            .chars()
            .map(|c| match c {
                'a'..='z' | 'A'..='Z' | '0'..='9' | '.' | '+' | '-' | '_' => c,
                _ => '_',
            })
            .take(64)
            .collect();
        let digest = hasher.finalize().to_hex();
        Self(format!(
            "{readable}-{}",
            digest.get(..24).unwrap_or_default()
        ))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn parse(text: &str) -> Option<Self> {
        let safe = !text.is_empty()
            && !text.starts_with('.')
            && text
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b".+-_".contains(&b));
        safe.then(|| Self(text.to_owned()))
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ref {
    schema: u32,
    key: String,
}

#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// The user's cache: `$XDG_CACHE_HOME/forkd`, or `~/.cache/forkd`.
    pub fn of_user() -> Result<Self, CacheError> {
        let folder = |name: &str| {
            std::env::var_os(name)
                .map(PathBuf::from)
                .filter(|path| path.is_absolute())
        };
        folder("XDG_CACHE_HOME")
            .or_else(|| folder("HOME").map(|home| home.join(".cache")))
            .map(|base| Self::at(base.join("forkd")))
            .ok_or(CacheError::NoFolder)
    }

    /// A cache in another folder.
    pub fn at(root: PathBuf) -> Self {
        Self { root }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The path of content, whether or not it exists.
    pub fn path(&self, kind: Kind, key: &Key) -> PathBuf {
        self.root.join(kind.folder()).join(&key.0)
    }

    /// Takes the lock with this name. Reports to `progress` if it has to wait.
    pub fn lock(&self, name: &str, progress: &Progress) -> Result<File, CacheError> {
        let path = self.root.join(name);
        if let Some(parent) = path.parent() {
            make_folder(parent)?;
        }
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(CacheError::io("open the lock", &path))?;
        match file.try_lock() {
            Ok(()) => Ok(file),
            Err(TryLockError::WouldBlock) => {
                progress.note(&format!(
                    "waiting for another process that holds {} …",
                    path.display()
                ));
                file.lock().map_err(CacheError::io("lock", &path))?;
                Ok(file)
            }
            Err(TryLockError::Error(source)) => Err(CacheError::Io {
                action: "lock",
                path,
                source,
            }),
        }
    }

    /// Returns the answer to a question. Calls `make` if there is none, or if `refresh` is set. `make` fills
    /// a folder and names its content. Two processes with the same question make the answer once.
    pub fn answer<E: From<CacheError>>(
        &self,
        kind: Kind,
        question: &Key,
        refresh: bool,
        progress: &Progress,
        make: impl FnOnce(&Path) -> Result<Key, E>,
    ) -> Result<PathBuf, E> {
        if !refresh && let Some(path) = self.known(kind, question) {
            return Ok(path);
        }
        let lock = format!("{}/locks/{}", kind.folder(), question.0);
        let _lock = self.lock(&lock, progress)?;
        if !refresh && let Some(path) = self.known(kind, question) {
            return Ok(path);
        }
        let staging = self.stage(kind)?;
        let key = make(staging.path())?;
        let path = staging.publish(&self.path(kind, &key))?;
        self.write_ref(kind, question, &key)?;
        Ok(path)
    }

    /// Returns content by its key. Calls `make` if it does not exist.
    pub fn content<E: From<CacheError>>(
        &self,
        kind: Kind,
        key: &Key,
        progress: &Progress,
        make: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<PathBuf, E> {
        let path = self.path(kind, key);
        if path.is_dir() {
            return Ok(path);
        }
        let lock = format!("{}/locks/{}", kind.folder(), key.0);
        let _lock = self.lock(&lock, progress)?;
        if path.is_dir() {
            return Ok(path);
        }
        let staging = self.stage(kind)?;
        make(staging.path())?;
        Ok(staging.publish(&path)?)
    }

    /// Removes the oldest contents of a kind until `count` are left. `used` stays.
    pub fn keep_newest(&self, kind: Kind, count: usize, used: &Path) -> Result<(), CacheError> {
        let folder = self.root.join(kind.folder());
        let _lock = self.lock(
            &format!("{}/staging.lock", kind.folder()),
            &Progress::silent(),
        )?;
        let mut contents = Vec::new();
        for entry in std::fs::read_dir(&folder).map_err(CacheError::io("read", &folder))? {
            let entry = entry.map_err(CacheError::io("read", &folder))?;
            let name = entry.file_name();
            let kept = ["refs", "staging", "locks"].iter().any(|own| name == *own);
            let meta = entry.metadata().map_err(CacheError::io("read", &folder))?;
            if meta.is_dir() && !kept && entry.path() != used {
                contents.push((meta.modified().ok(), entry.path()));
            }
        }
        contents.sort();
        let over = (contents.len() + 1).saturating_sub(count);
        for (_, path) in contents.iter().take(over) {
            remove_tree(path).map_err(CacheError::io("remove", path))?;
        }
        Ok(())
    }

    fn ref_path(&self, kind: Kind, question: &Key) -> PathBuf {
        self.root
            .join(kind.folder())
            .join("refs")
            .join(format!("{}.json", question.0))
    }

    /// The content that a reference names. An unreadable reference, or one to missing content, counts as no
    /// answer.
    fn known(&self, kind: Kind, question: &Key) -> Option<PathBuf> {
        let text = std::fs::read(self.ref_path(kind, question)).ok()?;
        let known: Ref = serde_json::from_slice(&text).ok()?;
        let key = Key::parse(&known.key).filter(|_| known.schema == REF_SCHEMA)?;
        Some(self.path(kind, &key)).filter(|path| path.is_dir())
    }

    fn write_ref(&self, kind: Kind, question: &Key, key: &Key) -> Result<(), CacheError> {
        let path = self.ref_path(kind, question);
        let text = serde_json::json!(Ref {
            schema: REF_SCHEMA,
            key: key.0.clone()
        })
        .to_string();
        write_atomically(&path, text.as_bytes())
    }

    fn stage(&self, kind: Kind) -> Result<Staging, CacheError> {
        let folder = self.root.join(kind.folder()).join("staging");
        make_folder(&folder)?;
        // Held while a folder is made and locked, so that no other process sweeps it in between.
        let name = format!("{}/staging.lock", kind.folder());
        let _sweep = self.lock(&name, &Progress::silent())?;
        sweep(&folder)?;
        let path = tempfile::Builder::new()
            .prefix("build-")
            .tempdir_in(&folder)
            .map_err(CacheError::io("make a folder in", &folder))?;
        let held = File::open(path.path()).map_err(CacheError::io("open", path.path()))?;
        held.lock().map_err(CacheError::io("lock", path.path()))?;
        Ok(Staging { path, _held: held })
    }
}

/// Removes the staging folders of dead builds.
fn sweep(folder: &Path) -> Result<(), CacheError> {
    let entries = std::fs::read_dir(folder).map_err(CacheError::io("read", folder))?;
    for entry in entries {
        let path = entry.map_err(CacheError::io("read", folder))?.path();
        let Ok(file) = File::open(&path) else {
            continue;
        };
        if file.try_lock().is_ok() {
            remove_tree(&path).map_err(CacheError::io("remove", &path))?;
        }
    }
    Ok(())
}

/// Removes a folder. An unpacked root contains folders without write permission, which only a privileged user
/// can empty.
fn remove_tree(path: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            make_writable(path)?;
            std::fs::remove_dir_all(path)
        }
        other => other,
    }
}

fn make_writable(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o700))?;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            make_writable(&entry.path())?;
        }
    }
    Ok(())
}

/// A folder in which content is made. Dropping it removes the folder.
#[derive(Debug)]
struct Staging {
    path: tempfile::TempDir,
    _held: File,
}

impl Staging {
    fn path(&self) -> &Path {
        self.path.path()
    }

    /// Renames the finished folder into place, unless the same content exists already.
    fn publish(self, to: &Path) -> Result<PathBuf, CacheError> {
        let from = self.path.path();
        // A crash of the host must not leave a complete-looking folder with empty files.
        rustix::fs::syncfs(&self._held)
            .map_err(|errno| CacheError::io("write out", from)(errno.into()))?;
        match std::fs::rename(from, to) {
            Ok(()) => {
                use std::os::unix::fs::PermissionsExt;
                // The folder was private while it was filled. Finished content is readable for all users.
                std::fs::set_permissions(to, std::fs::Permissions::from_mode(0o755))
                    .map_err(CacheError::io("open up", to))?;
                // The folder is elsewhere now: nothing is left to remove.
                let _ = self.path.keep();
                Ok(to.to_owned())
            }
            Err(_) if to.is_dir() => Ok(to.to_owned()),
            Err(source) => Err(CacheError::io("move the finished build to", to)(source)),
        }
    }
}

fn make_folder(path: &Path) -> Result<(), CacheError> {
    std::fs::create_dir_all(path).map_err(CacheError::io("make the folder", path))
}

/// Replaces a file atomically.
pub fn write_atomically(path: &Path, content: &[u8]) -> Result<(), CacheError> {
    use std::io::Write;
    let folder = path.parent().unwrap_or(Path::new("."));
    make_folder(folder)?;
    let write = || {
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(content)?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|error| error.error)?;
        Ok(())
    };
    write().map_err(CacheError::io("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question() -> Key {
        Key::new("question", &[b"q"])
    }

    fn answer(cache: &Cache, refresh: bool, content: &str) -> PathBuf {
        cache
            .answer::<CacheError>(
                Kind::Image,
                &question(),
                refresh,
                &Progress::silent(),
                |folder| {
                    std::fs::write(folder.join("file"), content).unwrap();
                    Ok(Key::new("content", &[content.as_bytes()]))
                },
            )
            .unwrap()
    }

    fn files(cache: &Cache, below: &str) -> usize {
        std::fs::read_dir(cache.root().join("image").join(below))
            .unwrap()
            .count()
    }

    #[test]
    fn an_answer_is_made_once_and_again_on_refresh() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().into());
        let first = answer(&cache, false, "one");
        assert_eq!(answer(&cache, false, "two"), first);
        let second = answer(&cache, true, "two");
        assert_ne!(second, first);
        assert_eq!(answer(&cache, false, "three"), second);
        assert_eq!(std::fs::read(first.join("file")).unwrap(), b"one");
        assert_eq!(files(&cache, "staging"), 0);
    }

    #[test]
    fn the_oldest_contents_go_and_the_used_one_stays() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().into());
        let made: Vec<_> = ["one", "two", "three"]
            .map(|content| answer(&cache, true, content))
            .into();
        cache.keep_newest(Kind::Image, 2, &made[0]).unwrap();
        let left = made.iter().filter(|path| path.is_dir()).count();
        assert!(left == 2 && made[0].is_dir(), "{left}");
        assert_eq!(answer(&cache, false, "four"), made[2]);
    }

    #[test]
    fn a_failed_build_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().into());
        let result = cache.answer::<CacheError>(
            Kind::Image,
            &question(),
            false,
            &Progress::silent(),
            |folder| {
                std::fs::write(folder.join("half"), "x").unwrap();
                Err(CacheError::NoFolder)
            },
        );
        assert!(matches!(result, Err(CacheError::NoFolder)));
        assert_eq!(files(&cache, "staging"), 0);
        assert_eq!(
            std::fs::read(answer(&cache, false, "y").join("file")).unwrap(),
            b"y"
        );
    }

    #[test]
    fn many_at_once_build_once() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().into());
        let builds = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    cache
                        .answer::<CacheError>(
                            Kind::Image,
                            &question(),
                            false,
                            &Progress::silent(),
                            |folder| {
                                builds.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                                std::fs::write(folder.join("file"), "x").unwrap();
                                Ok(Key::new("content", &[b"x"]))
                            },
                        )
                        .unwrap();
                });
            }
        });
        assert_eq!(builds.into_inner(), 1);
    }

    #[test]
    fn a_staging_folder_in_use_survives_and_a_dead_one_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().into());
        let alive = cache.stage(Kind::Image).unwrap();
        let dead = cache.root().join("image/staging/build-dead");
        std::fs::create_dir_all(dead.join("root/locked")).unwrap();
        answer(&cache, false, "x");
        assert!(alive.path().is_dir());
        assert!(!dead.exists());
    }

    #[test]
    fn a_broken_reference_is_no_answer() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().into());
        answer(&cache, false, "one");
        let path = cache.ref_path(Kind::Image, &question());
        for text in [
            "{",
            r#"{"schema":2,"key":"content"}"#,
            r#"{"schema":1,"key":"../../etc"}"#,
            r#"{"schema":1,"key":"gone"}"#,
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(cache.known(Kind::Image, &question()), None, "{text}");
        }
        answer(&cache, false, "one");
        assert!(cache.known(Kind::Image, &question()).is_some());
    }

    #[test]
    fn parts_do_not_run_together() {
        assert_ne!(Key::new("k", &[b"ab", b"c"]), Key::new("k", &[b"a", b"bc"]));
    }
}
