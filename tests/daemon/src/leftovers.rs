//! Files and processes that a daemon leaves on its host.

use std::path::{Path, PathBuf};

/// Files and processes that belong to sandboxes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Directories of sandboxes, staged files and sockets.
    pub files: Vec<PathBuf>,
    /// Process ids of VMMs.
    pub vmms: Vec<u32>,
    /// Files in memory, and files without a name, that `forkd-spawn` keeps.
    pub kept: Vec<PathBuf>,
}

impl Leftovers {
    pub(crate) fn find(data: &Path, run: &Path, programs: &Path) -> Self {
        let mut files = entries(&data.join("sandboxes"));
        files.extend(entries(&data.join("staging")));
        files.extend(
            entries(run)
                .into_iter()
                .filter(|path| name(path).starts_with("sb")),
        );
        files.sort();
        Self {
            files,
            vmms: processes(&programs.join("forkd-vmm")),
            kept: kept(&programs.join("forkd-spawn")),
        }
    }
}

/// The processes of a program, by the path the kernel knows it by. A zombie has no program.
pub(crate) fn processes(program: &Path) -> Vec<u32> {
    let mut found: Vec<u32> = entries(Path::new("/proc"))
        .into_iter()
        .filter(|process| std::fs::read_link(process.join("exe")).is_ok_and(|exe| exe == program))
        .filter_map(|process| name(&process).parse().ok())
        .collect();
    found.sort_unstable();
    found
}

/// The files without a name that a program has open.
fn kept(program: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = processes(program)
        .into_iter()
        .flat_map(|pid| entries(&PathBuf::from(format!("/proc/{pid}/fd"))))
        .filter_map(|fd| std::fs::read_link(fd).ok())
        .filter(|target| {
            let target = target.to_string_lossy();
            target.starts_with("/memfd:") || target.ends_with(".draft (deleted)")
        })
        .collect();
    found.sort();
    found
}

pub(crate) fn entries(dir: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect()
}

fn name(path: &Path) -> &str {
    path.file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default()
}
