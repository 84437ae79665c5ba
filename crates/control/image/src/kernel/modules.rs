//! The modules of a kernel, and their load order.
//!
//! [`Modules::closure`] returns the requested modules and their dependencies, each after the modules that it
//! needs. Built-in modules are left out.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::elf::{self, ElfError};

/// Upper bound on one module. Real ones have a few megabytes.
const MAX_MODULE: u64 = 256 << 20;

/// Why the modules of a kernel are rejected.
#[derive(Debug, Error)]
pub enum ModulesError {
    #[error("{} cannot be read", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is not a kernel module", path.display())]
    NotAModule {
        path: PathBuf,
        #[source]
        source: ElfError,
    },
    /// A required module is neither a file nor built in.
    #[error("the module {name} is neither in {} nor built into the kernel{}", folder.display(), needed_by(by))]
    Missing {
        name: String,
        /// The module that needs it. `None` if it was requested directly.
        by: Option<String>,
        folder: PathBuf,
    },
}

fn needed_by(by: &Option<String>) -> String {
    by.as_ref()
        .map(|by| format!(" (needed by {by})"))
        .unwrap_or_default()
}

/// The canonical name of a module: the kernel treats dashes and underscores alike.
fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

fn name_of(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let stem = [".ko", ".ko.xz", ".ko.zst", ".ko.gz"]
        .iter()
        .find_map(|suffix| file.strip_suffix(suffix))?;
    Some(canonical(stem))
}

/// The module files of one kernel.
#[derive(Debug, Clone, Default)]
pub struct Modules {
    folder: PathBuf,
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
    /// A kernel that came without modules is assumed to have all of them built in.
    everything_builtin: bool,
}

/// A module that is ready to be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedModule {
    pub name: String,
    /// The uncompressed ELF file.
    pub content: Vec<u8>,
}

impl Modules {
    /// Opens a folder such as `/lib/modules/6.12.1`.
    pub fn open(folder: &Path) -> Result<Self, ModulesError> {
        let mut modules = Self {
            folder: folder.to_owned(),
            ..Self::default()
        };
        modules.scan(folder)?;
        let list = folder.join("modules.builtin");
        match std::fs::read_to_string(&list) {
            Ok(text) => {
                modules.builtin = text
                    .lines()
                    .filter_map(|line| name_of(Path::new(line.trim())))
                    .collect();
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(ModulesError::Read { path: list, source }),
        }
        Ok(modules)
    }

    /// The modules of a kernel that came without any.
    pub fn none() -> Self {
        Self {
            everything_builtin: true,
            ..Self::default()
        }
    }

    fn scan(&mut self, folder: &Path) -> Result<(), ModulesError> {
        let read_error = |source| ModulesError::Read {
            path: folder.to_owned(),
            source,
        };
        for entry in std::fs::read_dir(folder).map_err(read_error)? {
            let entry = entry.map_err(read_error)?;
            // Links (`build`, `source`) lead out of the folder.
            let kind = entry.file_type().map_err(read_error)?;
            if kind.is_dir() {
                self.scan(&entry.path())?;
            } else if kind.is_file()
                && let Some(name) = name_of(&entry.path())
            {
                self.files.insert(name, entry.path());
            }
        }
        Ok(())
    }

    /// Name and path of every module.
    pub fn list(&self) -> impl Iterator<Item = (&str, &Path)> {
        self.files.iter().map(|(name, path)| {
            let below = path.strip_prefix(&self.folder).unwrap_or(path);
            (name.as_str(), below)
        })
    }

    /// The requested modules and their dependencies, in load order. Built-in modules are left out.
    pub fn closure(&self, wanted: &[&str]) -> Result<Vec<LoadedModule>, ModulesError> {
        let mut walk = Walk {
            modules: self,
            seen: BTreeSet::new(),
            order: Vec::new(),
        };
        for name in wanted {
            walk.visit(&canonical(name), None, true)?;
        }
        Ok(walk.order)
    }

    fn load(&self, path: &Path) -> Result<Vec<u8>, ModulesError> {
        read_module(path).map_err(|source| ModulesError::Read {
            path: path.to_owned(),
            source,
        })
    }
}

struct Walk<'a> {
    modules: &'a Modules,
    seen: BTreeSet<String>,
    order: Vec<LoadedModule>,
}

impl Walk<'_> {
    fn visit(&mut self, name: &str, by: Option<&str>, must: bool) -> Result<(), ModulesError> {
        let modules = self.modules;
        if self.seen.contains(name) {
            return Ok(());
        }
        let Some(path) = modules.files.get(name) else {
            if modules.everything_builtin || modules.builtin.contains(name) || !must {
                return Ok(());
            }
            return Err(ModulesError::Missing {
                name: name.to_owned(),
                by: by.map(str::to_owned),
                folder: modules.folder.clone(),
            });
        };
        // Marked before its needs are followed, so that a circle ends.
        self.seen.insert(name.to_owned());
        let content = modules.load(path)?;
        let needs = elf::inspect_module(&content).map_err(|source| ModulesError::NotAModule {
            path: path.clone(),
            source,
        })?;
        for other in &needs.wants {
            self.visit(&canonical(other), Some(name), false)?;
        }
        for other in &needs.depends {
            self.visit(&canonical(other), Some(name), true)?;
        }
        self.order.push(LoadedModule {
            name: name.to_owned(),
            content,
        });
        Ok(())
    }
}

fn read_module(path: &Path) -> io::Result<Vec<u8>> {
    let file = io::BufReader::new(File::open(path)?);
    let mut plain = Vec::new();
    let reader: Box<dyn Read> = match path.extension().and_then(|ext| ext.to_str()) {
        Some("xz") => Box::new(lzma_rust2::XzReader::new(file, true)),
        Some("zst") => Box::new(zstd::Decoder::with_buffer(file)?),
        Some("gz") => Box::new(flate2::bufread::GzDecoder::new(file)),
        _ => Box::new(file),
    };
    let read = reader.take(MAX_MODULE + 1).read_to_end(&mut plain)?;
    if read as u64 > MAX_MODULE {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("it is larger than {MAX_MODULE} bytes"),
        ));
    }
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::test_elf::module_file;

    fn folder(files: &[(&str, &str)], builtin: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("kernel/drivers")).unwrap();
        for (name, modinfo) in files {
            let path = folder.path().join("kernel/drivers").join(name);
            let content = module_file(modinfo);
            let content = if name.ends_with(".zst") {
                zstd::encode_all(&content[..], 1).unwrap()
            } else {
                content
            };
            std::fs::write(path, content).unwrap();
        }
        std::fs::write(folder.path().join("modules.builtin"), builtin).unwrap();
        folder
    }

    fn names(order: &[LoadedModule]) -> Vec<&str> {
        order.iter().map(|module| module.name.as_str()).collect()
    }

    #[test]
    fn what_is_needed_comes_first_and_once() {
        let folder = folder(
            &[
                ("net.ko", "depends=net-failover,core\0license=GPL\0"),
                ("net_failover.ko.zst", "depends=failover\0"),
                ("failover.ko", "depends=\0"),
                ("core.ko", "depends=failover\0"),
                ("unused.ko", "depends=missing\0"),
            ],
            "",
        );
        let modules = Modules::open(folder.path()).unwrap();
        let order = modules.closure(&["core", "net"]).unwrap();
        assert_eq!(names(&order), ["failover", "core", "net_failover", "net"]);
        assert_eq!(order[0].content, module_file("depends=\0"));
    }

    #[test]
    fn built_in_modules_are_left_out_and_missing_ones_are_named() {
        let folder = folder(
            &[("a.ko", "depends=b-in\0"), ("c.ko", "depends=gone\0")],
            "kernel/lib/b_in.ko\n",
        );
        let modules = Modules::open(folder.path()).unwrap();
        assert_eq!(names(&modules.closure(&["a", "b_in"]).unwrap()), ["a"]);
        let error = modules.closure(&["c"]).unwrap_err();
        assert!(error.to_string().contains("gone"), "{error}");
        assert!(error.to_string().contains("needed by c"), "{error}");
    }

    #[test]
    fn soft_needs_may_be_missing_and_circles_end() {
        let folder = folder(
            &[
                ("a.ko", "depends=b\0softdep=pre: gone c\0"),
                ("b.ko", "depends=a\0"),
                ("c.ko", "depends=\0"),
            ],
            "",
        );
        let modules = Modules::open(folder.path()).unwrap();
        assert_eq!(names(&modules.closure(&["a"]).unwrap()), ["c", "b", "a"]);
    }

    #[test]
    fn a_kernel_without_modules_needs_none() {
        assert!(Modules::none().closure(&["virtio_blk"]).unwrap().is_empty());
    }

    #[test]
    fn a_file_that_is_no_module_is_named() {
        let folder = folder(&[], "");
        std::fs::write(folder.path().join("x.ko"), "text").unwrap();
        let error = Modules::open(folder.path())
            .unwrap()
            .closure(&["x"])
            .unwrap_err();
        assert!(matches!(error, ModulesError::NotAModule { .. }));
    }
}
