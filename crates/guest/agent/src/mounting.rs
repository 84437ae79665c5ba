//! Mounts that exist while a step of a build runs.

use std::ffi::CString;
use std::fs;
use std::path::{Path, PathBuf};

use forkd_guest_proto::{AgentError, MountRequest, MountResult, MountSource, UnmountRequest};
use rustix::mount::{MountFlags, UnmountFlags};

use crate::error;
use crate::files::{absolute, blocking};

/// Mounts something. A target that is missing is made, as a folder or as an empty file.
pub async fn mount(request: MountRequest) -> Result<MountResult, AgentError> {
    let target = absolute(&request.target)?;
    blocking(move || {
        let is_file = match &request.what {
            MountSource::Bind(source) => {
                let source = absolute(source)?;
                let found =
                    fs::metadata(&source).map_err(|error| error::at("look at", &source, &error))?;
                !found.is_dir()
            }
            MountSource::Tmpfs { .. } => false,
        };
        let made = make(&target, is_file)?;
        let result = attach(&request, &target);
        if let (Err(_), Some(made)) = (&result, &made) {
            remove(&target, made);
        }
        result?;
        Ok(MountResult {
            made: made.map(|path| path.to_string_lossy().into_owned()),
        })
    })
    .await
}

/// The first path that was made.
fn make(target: &Path, is_file: bool) -> Result<Option<PathBuf>, AgentError> {
    let missing = target
        .ancestors()
        .take_while(|path| !path.exists())
        .last()
        .map(Path::to_owned);
    if missing.is_some() {
        let failed = |error: std::io::Error| error::at("make", target, &error);
        if is_file {
            if let Some(parent) = target.parent() {
                fs::create_dir_all(parent).map_err(failed)?;
            }
            fs::write(target, b"").map_err(failed)?;
        } else {
            fs::create_dir_all(target).map_err(failed)?;
        }
    }
    Ok(missing)
}

fn attach(request: &MountRequest, target: &Path) -> Result<(), AgentError> {
    let failed = |errno: rustix::io::Errno| error::at("mount on", target, &errno.into());
    match &request.what {
        MountSource::Bind(source) => {
            rustix::mount::mount_bind(source.as_str(), target).map_err(failed)?;
            if request.read_only {
                let flags = MountFlags::BIND | MountFlags::RDONLY;
                let result = rustix::mount::mount_remount(target, flags, c"");
                if let Err(errno) = result {
                    // A mount that can be written is not what was asked for.
                    let _ = rustix::mount::unmount(target, UnmountFlags::DETACH);
                    return Err(failed(errno));
                }
            }
            Ok(())
        }
        MountSource::Tmpfs { size_mib } => {
            let size = size_mib.map_or_else(String::new, |mib| format!(",size={mib}m"));
            let options = CString::new(format!("mode=1777{size}")).unwrap_or_default();
            let flags = MountFlags::NOSUID | MountFlags::NODEV;
            rustix::mount::mount("tmpfs", target, "tmpfs", flags, options.as_c_str())
                .map_err(failed)
        }
    }
}

/// Ends a mount, and removes what was made for it.
pub async fn unmount(request: UnmountRequest) -> Result<(), AgentError> {
    let target = absolute(&request.target)?;
    let made = request.remove.as_deref().map(absolute).transpose()?;
    blocking(move || {
        rustix::mount::unmount(&target, UnmountFlags::empty())
            .map_err(|errno| error::at("unmount", &target, &errno.into()))?;
        if let Some(made) = made {
            remove(&target, &made);
        }
        Ok(())
    })
    .await
}

/// Removes the empty file or folder that was made as a target, and folders above it that were made for it. A folder that
/// holds files of a step stays.
fn remove(target: &Path, made: &Path) {
    let is_empty_file = |found: fs::Metadata| found.is_file() && found.len() == 0;
    if fs::symlink_metadata(target).is_ok_and(is_empty_file) {
        let _ = fs::remove_file(target);
    }
    for folder in target.ancestors() {
        if !folder.starts_with(made) {
            break;
        }
        let _ = fs::remove_dir(folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_made_for_a_target_goes_and_files_of_a_step_stay() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        assert_eq!(make(&at("a/b/c"), true).unwrap(), Some(at("a")));
        assert!(at("a/b/c").is_file());
        remove(&at("a/b/c"), &at("a"));
        assert!(!at("a").exists());
        assert_eq!(make(&at("d/e"), false).unwrap(), Some(at("d")));
        fs::write(at("d/kept"), "").unwrap();
        remove(&at("d/e"), &at("d"));
        assert!(at("d/kept").exists() && !at("d/e").exists());
        assert_eq!(make(&at("d"), false).unwrap(), None);
    }
}
