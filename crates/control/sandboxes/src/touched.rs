//! Which pages the first child of a snapshot touches until it is ready. The children after it find them present.
//!
//! The VMM writes and checks these files. They lie beside the store by the digest of the snapshot's oldest memory layer,
//! so branches and live forks use the set of the snapshot that they descend from: a guest wakes up in the same code
//! whatever it did before. The files can be lost without harm.
//!
//! The files are not synced, so a power failure can leave damaged ones, which every child would be refused with. A daemon
//! that finds the sets of an earlier boot of the host removes them all.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forkd_store::{Manifest, volatile_file};
use forkd_types::Digest;
use forkd_vmm_link::Vmm;
use forkd_vmm_proto::Command;
use parking_lot::Mutex;

use crate::app::App;
use crate::error::Error;
use crate::launch::FdList;

/// Changes with every boot of the host.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Ending of a file that is being written.
const UNFINISHED: &str = "new";
/// The largest set that is kept, far above what a VMM writes.
const MAX_BYTES: u64 = 1 << 20;

/// The key of a snapshot's set, which all snapshots have in common that descend from one parent.
pub fn key(manifest: &Manifest) -> Digest {
    let oldest = manifest.memory.layers.first();
    oldest.map_or(manifest.state.digest, |layer| layer.digest)
}

/// The recorded sets.
#[derive(Debug)]
pub struct Touched {
    dir: PathBuf,
    /// Snapshots whose set is being recorded.
    busy: Mutex<HashSet<Digest>>,
}

impl Touched {
    /// Opens the directory, and makes it if it is missing. Sets of another boot of the host are removed.
    pub fn open(dir: PathBuf) -> io::Result<Self> {
        Self::open_in(dir, &std::fs::read_to_string(BOOT_ID)?)
    }

    fn open_in(dir: PathBuf, boot: &str) -> io::Result<Self> {
        let noted = dir.with_extension("boot");
        if std::fs::read_to_string(&noted).is_ok_and(|noted| noted == boot) {
            std::fs::create_dir_all(&dir)?;
        } else {
            if dir.exists() {
                std::fs::remove_dir_all(&dir)?;
            }
            std::fs::create_dir_all(&dir)?;
            std::fs::write(noted, boot)?;
        }
        Ok(Self {
            dir,
            busy: Mutex::default(),
        })
    }

    fn path(&self, key: &Digest) -> PathBuf {
        self.dir.join(key.hex())
    }

    /// The set of a snapshot, if there is one.
    pub fn get(&self, key: &Digest) -> Option<File> {
        File::open(self.path(key)).ok()
    }

    /// Removes the sets of all other snapshots, but for those that are being recorded.
    pub fn keep_only(&self, keys: &HashSet<Digest>) -> io::Result<()> {
        // Held until the end, so that none is begun meanwhile.
        let busy = self.busy();
        let wanted: HashSet<String> = keys.iter().map(Digest::hex).collect();
        let written: HashSet<String> = busy.iter().map(Digest::hex).collect();
        for entry in std::fs::read_dir(&self.dir)? {
            let entry = entry?;
            let path = entry.path();
            let name = entry.file_name();
            let keep = name.to_str().is_some_and(|name| wanted.contains(name))
                || path
                    .file_stem()
                    .and_then(OsStr::to_str)
                    .is_some_and(|stem| written.contains(stem));
            if !keep {
                std::fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    /// Begins to record a set; `None` if there is one, or another child records it.
    fn begin(self: &Arc<Self>, key: Digest) -> Option<Recording> {
        let begun = self.get(&key).is_none() && self.busy().insert(key);
        begun.then(|| Recording {
            sets: Arc::clone(self),
            key,
        })
    }

    fn busy(&self) -> parking_lot::MutexGuard<'_, HashSet<Digest>> {
        self.busy.lock()
    }
}

/// A set that is being recorded. A later child can record it again if this value is dropped without a file.
struct Recording {
    sets: Arc<Touched>,
    key: Digest,
}

impl Recording {
    fn keep(&self, set: &File) -> Result<(), Error> {
        let path = self.sets.path(&self.key);
        keep(set, &path).map_err(Error::io("write", &path))
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.sets.busy().remove(&self.key);
    }
}

/// Records what a child that has just become ready touched, unless another child of the snapshot has done it.
pub async fn record(app: &App, vmm: &Vmm, key: Digest) {
    let Some(recording) = app.touched.begin(key) else {
        return;
    };
    let asked = ask(vmm).await;
    // The child does not wait for the file.
    tokio::task::spawn_blocking(move || {
        if let Err(error) = asked.and_then(|set| recording.keep(&set)) {
            tracing::warn!(set = %key, error = error.chain(), "touched pages not recorded");
        }
    });
}

/// Has the VMM write its set to a file without a name.
async fn ask(vmm: &Vmm) -> Result<File, Error> {
    let file = volatile_file("touched").map_err(Error::io("create", "a file in memory"))?;
    let mut fds = FdList::default();
    let output = fds.push(&file);
    vmm.run(Command::WorkingSet { output }, &fds.finish()?)
        .await
        .map_err(Error::vmm("the VMM did not do it"))?;
    Ok(file)
}

/// Copies a set to a file that no VMM has open: a VMM that was taken over must not choose later which pages the
/// children of others load.
fn keep(set: &File, path: &Path) -> io::Result<()> {
    let mut bytes = Vec::new();
    let mut set = set;
    set.seek(SeekFrom::Start(0))?;
    set.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let unfinished = path.with_extension(UNFINISHED);
    std::fs::write(&unfinished, bytes)?;
    std::fs::rename(unfinished, path)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn sets_of_an_earlier_boot_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("touched");
        let set = Digest([1; 32]);
        let open = |boot| Touched::open_in(dir.clone(), boot).unwrap();
        std::fs::write(open("first").path(&set), "pages").unwrap();
        assert!(open("first").get(&set).is_some());
        assert!(open("second").get(&set).is_none());
        // A directory of a daemon that noted no boot.
        std::fs::write(open("second").path(&set), "pages").unwrap();
        std::fs::remove_file(dir.with_extension("boot")).unwrap();
        assert!(open("second").get(&set).is_none());
    }

    #[test]
    fn a_kept_set_is_not_the_file_of_the_vmm() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("set");
        let mut written = volatile_file("set").unwrap();
        written.write_all(b"pages").unwrap();
        keep(&written, &path).unwrap();
        written.write_all(b" and others").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"pages");
        written.set_len(MAX_BYTES + 1).unwrap();
        assert!(keep(&written, &path).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"pages");
    }

    #[test]
    fn a_branch_has_the_set_of_its_parent() {
        let manifest = |state: u8, layers: &[u8]| -> Manifest {
            let blob = |byte: u8| serde_json::json!({"digest": Digest([byte; 32]), "bytes": 4096});
            let layers: Vec<_> = layers.iter().copied().map(blob).collect();
            serde_json::from_value(serde_json::json!({
                "schema": forkd_store::SCHEMA, "tag": "a", "created_at_unix": 1, "engine": "forkd",
                "memory_mib": 1, "vcpus": 1, "cpu": "host", "state": blob(state),
                "memory": {"layers": layers}, "disks": [],
                "source": forkd_store::Source::default(), "origin": {"kind": "import"},
                "versions": forkd_store::Versions::default(),
            }))
            .unwrap()
        };
        let parent = key(&manifest(1, &[7]));
        assert_eq!(key(&manifest(2, &[7, 8])), parent);
        assert_eq!(key(&manifest(3, &[7, 8, 9])), parent);
        assert_ne!(key(&manifest(4, &[8])), parent);
    }

    #[test]
    fn sets_of_snapshots_that_are_gone_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let touched = Arc::new(Touched::open(dir.path().join("touched")).unwrap());
        let [kept, gone] = [Digest([1; 32]), Digest([2; 32])];
        for state in [kept, gone] {
            let recording = touched.begin(state).unwrap();
            assert!(touched.begin(state).is_none(), "two record at once");
            // The child was deleted before its VMM answered.
            drop(recording);
            let recording = touched.begin(state).unwrap();
            std::fs::write(touched.path(&state), "set").unwrap();
            drop(recording);
            assert!(touched.begin(state).is_none(), "it is there already");
        }
        std::fs::write(touched.path(&kept).with_extension(UNFINISHED), "half").unwrap();
        let written = Digest([3; 32]);
        let _recording = touched.begin(written).unwrap();
        std::fs::write(touched.path(&written).with_extension(UNFINISHED), "").unwrap();
        touched.keep_only(&HashSet::from([kept])).unwrap();
        assert!(touched.get(&kept).is_some());
        assert!(touched.get(&gone).is_none());
        assert_eq!(std::fs::read_dir(&touched.dir).unwrap().count(), 2);
    }
}
