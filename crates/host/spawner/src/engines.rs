//! The engines of this host: which program runs a VM of which engine, and what a VM of the engine needs around it.
//!
//! [`Engines`] is the one place that knows this. A shape names its engine; every other part of `forkd-spawn` treats all
//! VMM programs alike.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use forkd_types::Engine;
use forkd_vmm_proto::spawn::{SpawnError, Wall, Walls};

/// The programs that run VMs, by engine.
#[derive(Debug, Clone, Default)]
pub struct Engines(BTreeMap<Engine, Program>);

/// A program that runs VMs of one engine.
#[derive(Debug, Clone)]
pub struct Program {
    /// The VMM, or the adapter that speaks the VM protocol for it.
    pub path: PathBuf,
    /// The installed program behind an adapter.
    pub adapted: Option<Adapted>,
}

/// A VMM of another project, which opens paths by itself.
#[derive(Debug, Clone)]
pub struct Adapted {
    /// The installed program.
    pub program: PathBuf,
    /// Below this folder each VM has one of its own.
    pub folders: PathBuf,
}

/// The folder of one VM. It is removed when this is dropped.
#[derive(Debug)]
pub struct VmFolder(PathBuf);

impl Drop for VmFolder {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            crate::say(&format!("{} was not removed: {error}", self.0.display()));
        }
    }
}

impl Engines {
    /// Adds an engine.
    pub fn add(&mut self, engine: Engine, program: Program) {
        self.0.insert(engine, program);
    }

    /// The names of all engines.
    pub fn names(&self) -> Vec<Engine> {
        self.0.keys().copied().collect()
    }

    /// The program of an engine.
    pub fn get(&self, wanted: Engine) -> Result<&Program, SpawnError> {
        self.0.get(&wanted).ok_or_else(|| SpawnError::OtherEngine {
            wanted,
            have: self.names(),
        })
    }

    /// The wall that does not stand around VMs of an engine, wherever they run, and why.
    pub fn missing_wall(&self, engine: Engine) -> Option<(Wall, &'static str)> {
        let adapted = self.0.get(&engine)?.adapted.as_ref();
        adapted.map(|_| {
            let reason = "the engine opens paths, so its VMs keep the mounts of the host";
            (Wall::Namespaces, reason)
        })
    }

    /// Those of `walls` that stand around VMs of an engine.
    pub fn walls(&self, engine: Engine, walls: Walls) -> Walls {
        let missing = self.missing_wall(engine).map(|(wall, _)| wall);
        walls.iter().filter(|wall| Some(*wall) != missing).collect()
    }

    /// Every path that the programs need: to read, and to write.
    pub fn paths(&self) -> (Vec<&Path>, Vec<&Path>) {
        let mut readable: Vec<&Path> = Vec::new();
        let mut writable: Vec<&Path> = Vec::new();
        for program in self.0.values() {
            readable.push(program.path.parent().unwrap_or(&program.path));
            if let Some(adapted) = &program.adapted {
                readable.push(&adapted.program);
                writable.push(&adapted.folders);
            }
        }
        (readable, writable)
    }

    /// Removes the folders that an earlier process left, and makes the place for new ones.
    pub fn clear_folders(&self) -> io::Result<()> {
        for adapted in self
            .0
            .values()
            .filter_map(|program| program.adapted.as_ref())
        {
            match std::fs::remove_dir_all(&adapted.folders) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&adapted.folders)?;
        }
        Ok(())
    }
}

impl Program {
    /// The arguments of the program after its control socket, and the folder that they name.
    pub fn arguments(&self, number: u64) -> io::Result<(Vec<OsString>, Option<VmFolder>)> {
        let Some(adapted) = &self.adapted else {
            return Ok((Vec::new(), None));
        };
        let folder = adapted.folders.join(number.to_string());
        std::fs::create_dir(&folder)?;
        let made = VmFolder(folder.clone());
        // The user of the VM is not known to own it. Only the VM can reach it: the folder above is closed to all users,
        // and the VM enters this one before it changes its user.
        std::fs::set_permissions(&folder, Permissions::from_mode(0o777))?;
        let arguments = vec![
            "--firecracker".into(),
            adapted.program.clone().into(),
            "--dir".into(),
            folder.into(),
        ];
        Ok((arguments, Some(made)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engines(folders: &Path) -> Engines {
        let mut engines = Engines::default();
        let own = Program {
            path: "/opt/forkd/forkd-vmm".into(),
            adapted: None,
        };
        engines.add(Engine::FORKD, own);
        let program = Program {
            path: "/opt/forkd/forkd-fc".into(),
            adapted: Some(Adapted {
                program: "/opt/firecracker".into(),
                folders: folders.to_owned(),
            }),
        };
        engines.add(Engine::FIRECRACKER, program);
        engines
    }

    #[test]
    fn an_engine_that_is_not_there_is_named_with_those_that_are() {
        let engines = engines(Path::new("/nowhere"));
        assert!(engines.get(Engine::FIRECRACKER).is_ok());
        let error = engines.get("other".parse().unwrap()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "this host runs VMs with the engines firecracker, forkd, not other"
        );
    }

    #[test]
    fn a_vm_of_an_adapted_engine_has_a_folder_for_as_long_as_it_lives() {
        let dir = tempfile::tempdir().unwrap();
        let folders = dir.path().join("firecracker");
        std::fs::create_dir_all(folders.join("left")).unwrap();
        let engines = engines(&folders);
        engines.clear_folders().unwrap();
        assert_eq!(std::fs::read_dir(&folders).unwrap().count(), 0);
        let program = engines.get(Engine::FIRECRACKER).unwrap();
        let (arguments, folder) = program.arguments(7).unwrap();
        assert_eq!(arguments[3], folders.join("7").into_os_string());
        std::fs::write(folders.join("7/disk0"), b"x").unwrap();
        drop(folder);
        assert_eq!(std::fs::read_dir(&folders).unwrap().count(), 0);
        let own = engines.get(Engine::FORKD).unwrap();
        assert!(own.arguments(8).unwrap().1.is_none());
    }

    #[test]
    fn the_mounts_of_an_adapted_engine_are_those_of_the_host() {
        let engines = engines(Path::new("/nowhere"));
        assert_eq!(engines.walls(Engine::FORKD, Walls::all()), Walls::all());
        let left = engines.walls(Engine::FIRECRACKER, Walls::all());
        assert!(!left.contains(Wall::Namespaces));
        assert!(left.contains(Wall::User));
    }
}
