//! Keeps the programs in the machine equal to those of this build.
//!
//! `synced.json` has the content hash of each copied program, per start of the machine. An untouched file
//! costs one `stat`, a touched file is hashed, and a file with new content is copied.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{MachineError, file};
use crate::lock::MachineLock;
use crate::machine::Machine;
use crate::programs;
use crate::progress::{Progress, Step};
use crate::record::{read_versioned, write_json};
use crate::transfer::Parcel;

const SCHEMA: u32 = 1;
/// Folder of the programs in the machine.
const FOLDER_INSIDE: &str = "/usr/local/bin";

/// Content of `synced.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Synced {
    schema: u32,
    /// The start of the machine to which the hashes belong.
    instance: String,
    programs: BTreeMap<String, Program>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Program {
    /// Stamp of the host's file when it was hashed.
    stamp: Stamp,
    /// Hash of the content in the machine.
    hash: String,
}

/// Identity, size and time of a file: if they are equal, the content is taken to be equal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    modified_ns: i128,
}

impl Stamp {
    fn of(path: &Path) -> Option<Self> {
        let metadata = std::fs::metadata(path)
            .ok()
            .filter(std::fs::Metadata::is_file)?;
        Some(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified_ns: i128::from(metadata.mtime()) * 1_000_000_000
                + i128::from(metadata.mtime_nsec()),
        })
    }
}

impl Machine {
    /// Copies the programs of this build that differ from those in the machine. Returns their names.
    pub async fn sync(&self, progress: &dyn Progress) -> Result<Vec<String>, MachineError> {
        let instance = self.running()?.instance;
        let Some(folder) = programs::folder() else {
            return Ok(Vec::new());
        };
        let found = present(&folder);
        if touched(&self.synced(&instance), &found).is_empty() {
            return Ok(Vec::new());
        }
        let lock = self.layout.root().join("sync.lock");
        let _lock = MachineLock::take(&lock, || {}).await?;
        let mut synced = self.synced(&instance);
        let changed = changed(&mut synced, &found)?;
        if !changed.is_empty() {
            progress.step(&Step::Programs {
                count: changed.len(),
            });
            let session = self.connect().await?;
            let parcels = changed
                .iter()
                .map(|(name, path, _)| Parcel {
                    from: path.clone(),
                    to: name.into(),
                })
                .collect();
            session.push_all(parcels, FOLDER_INSIDE).await?;
            let programs = changed
                .iter()
                .map(|(name, _, program)| (name.clone(), program.clone()));
            synced.programs.extend(programs);
        }
        write_json(&self.layout.synced(), &synced)?;
        Ok(changed.into_iter().map(|(name, ..)| name).collect())
    }

    /// Reads `synced.json`. A missing or damaged file, or one of an earlier start, counts as empty.
    fn synced(&self, instance: &str) -> Synced {
        read_versioned::<Synced>(&self.layout.synced(), SCHEMA)
            .ok()
            .flatten()
            .filter(|synced| synced.instance == instance)
            .unwrap_or_else(|| Synced {
                schema: SCHEMA,
                instance: instance.to_owned(),
                programs: BTreeMap::new(),
            })
    }
}

/// The programs that exist on the host.
fn present(folder: &Path) -> Vec<(String, PathBuf, Stamp)> {
    programs::NAMES
        .iter()
        .filter_map(|name| {
            let path = folder.join(name);
            let stamp = Stamp::of(&path)?;
            Some(((*name).to_owned(), path, stamp))
        })
        .collect()
}

/// The programs whose stamp has changed.
fn touched<'a>(
    synced: &Synced,
    found: &'a [(String, PathBuf, Stamp)],
) -> Vec<&'a (String, PathBuf, Stamp)> {
    found
        .iter()
        .filter(|(name, _, stamp)| {
            synced
                .programs
                .get(name)
                .is_none_or(|program| program.stamp != *stamp)
        })
        .collect()
}

/// The programs whose content has changed. Updates the stamps of the others.
fn changed(
    synced: &mut Synced,
    found: &[(String, PathBuf, Stamp)],
) -> Result<Vec<(String, PathBuf, Program)>, MachineError> {
    let mut changed = Vec::new();
    for (name, path, stamp) in touched(&synced.clone(), found) {
        let hash = hash(path).map_err(file("read", path))?;
        let program = Program {
            stamp: stamp.clone(),
            hash,
        };
        match synced.programs.get_mut(name) {
            Some(inside) if inside.hash == program.hash => *inside = program,
            _ => changed.push((name.clone(), path.clone(), program)),
        }
    }
    Ok(changed)
}

fn hash(path: &Path) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_mmap(path)?;
    Ok(hasher.finalize().to_hex().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::time::{Duration, SystemTime};

    #[test]
    fn only_new_content_is_copied() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("forkd-vmm");
        fs::write(&program, "one").unwrap();
        fs::write(dir.path().join("unrelated"), "x").unwrap();

        let mut synced = Synced {
            schema: SCHEMA,
            ..Default::default()
        };
        let found = present(dir.path());
        let copied = changed(&mut synced, &found).unwrap();
        assert_eq!(copied.len(), 1);
        assert_eq!(copied[0].0, "forkd-vmm");
        synced
            .programs
            .insert(copied[0].0.clone(), copied[0].2.clone());
        assert!(touched(&synced, &found).is_empty());

        // Touched, and the same inside.
        let later = SystemTime::now() + Duration::from_secs(5);
        fs::File::options()
            .write(true)
            .open(&program)
            .unwrap()
            .set_modified(later)
            .unwrap();
        let found = present(dir.path());
        assert_eq!(touched(&synced, &found).len(), 1);
        assert!(changed(&mut synced, &found).unwrap().is_empty());
        assert!(touched(&synced, &found).is_empty());

        // Rebuilt.
        fs::write(&program, "two").unwrap();
        assert_eq!(changed(&mut synced, &present(dir.path())).unwrap().len(), 1);
    }
}
