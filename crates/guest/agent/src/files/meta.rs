//! Everything about files but their content.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use forkd_guest_proto::{
    AgentError, FileInfo, FileKind, MkdirRequest, RemoveRequest, RenameRequest, SetAttrRequest,
    StatRequest,
};
use rustix::fs::{CWD, RenameFlags};

use super::{absolute, attributes, blocking};
use crate::error;
use crate::process::users::Users;

/// Describes the file at a path.
pub async fn stat(request: StatRequest) -> Result<FileInfo, AgentError> {
    let path = absolute(&request.path)?;
    blocking(move || {
        let found = if request.no_follow {
            fs::symlink_metadata(&path)
        } else {
            fs::metadata(&path)
        };
        let found = found.map_err(|error| error::at("look at", &path, &error))?;
        let mut info = info(&path, &found);
        let users = Users::load();
        info.user = users.user_name(info.uid).map(ToOwned::to_owned);
        info.group = users.group_name(info.gid).map(ToOwned::to_owned);
        if let Some(prefix) = &request.attributes {
            info.attributes = attributes::read(&path, prefix);
        }
        Ok(info)
    })
    .await
}

/// Describes a file without the names of its owner and group.
pub fn info(path: &Path, found: &Metadata) -> FileInfo {
    let kind = if found.is_file() {
        FileKind::File
    } else if found.is_dir() {
        FileKind::Directory
    } else if found.is_symlink() {
        FileKind::Symlink
    } else {
        FileKind::Other
    };
    let target = (kind == FileKind::Symlink)
        .then(|| fs::read_link(path).ok())
        .flatten();
    FileInfo {
        kind,
        size: found.size(),
        mode: found.mode() & 0o7777,
        uid: found.uid(),
        gid: found.gid(),
        user: None,
        group: None,
        modified_unix_ms: found
            .mtime()
            .saturating_mul(1000)
            .saturating_add(found.mtime_nsec() / 1_000_000),
        target: target.map(|target| target.to_string_lossy().into_owned()),
        attributes: Default::default(),
    }
}

/// Makes a directory.
pub async fn mkdir(request: MkdirRequest) -> Result<(), AgentError> {
    let path = absolute(&request.path)?;
    blocking(move || {
        let made = if request.parents {
            fs::create_dir_all(&path)
        } else {
            fs::create_dir(&path)
        };
        made.map_err(|error| error::at("make", &path, &error))?;
        change(&path, request.mode, request.owner.as_deref())
    })
    .await
}

/// Renames a file or directory.
pub async fn rename(request: RenameRequest) -> Result<(), AgentError> {
    let (from, to) = (absolute(&request.from)?, absolute(&request.to)?);
    blocking(move || {
        let flags = if request.no_replace {
            RenameFlags::NOREPLACE
        } else {
            RenameFlags::empty()
        };
        rustix::fs::renameat_with(CWD, &from, CWD, &to, flags).map_err(|errno| {
            let what = format!("cannot rename {} to {}", from.display(), to.display());
            error::io(what, &errno.into())
        })
    })
    .await
}

/// Removes a file or directory.
pub async fn remove(request: RemoveRequest) -> Result<(), AgentError> {
    let path = absolute(&request.path)?;
    blocking(move || {
        // A recursive removal would empty the guest's disk before the kernel refuses the root itself.
        if is_root(&path) {
            return Err(error::bad("the root directory cannot be removed"));
        }
        let removed = fs::symlink_metadata(&path).and_then(|found| {
            match (found.is_dir(), request.recursive) {
                (true, true) => fs::remove_dir_all(&path),
                (true, false) => fs::remove_dir(&path),
                (false, _) => fs::remove_file(&path),
            }
        });
        match removed {
            Err(error) if error.kind() == io::ErrorKind::NotFound && request.missing_ok => Ok(()),
            other => other.map_err(|error| error::at("remove", &path, &error)),
        }
    })
    .await
}

/// The root under any of its names, such as `/tmp/..`.
fn is_root(path: &Path) -> bool {
    let (Ok(found), Ok(root)) = (fs::symlink_metadata(path), fs::symlink_metadata("/")) else {
        return false;
    };
    (found.dev(), found.ino()) == (root.dev(), root.ino())
}

/// Changes permissions, owner or extended attributes.
pub async fn set_attr(request: SetAttrRequest) -> Result<(), AgentError> {
    let path = absolute(&request.path)?;
    blocking(move || {
        change(&path, request.mode, request.owner.as_deref())?;
        match &request.attributes {
            Some(wanted) => attributes::write(&path, wanted),
            None => Ok(()),
        }
    })
    .await
}

fn change(path: &Path, mode: Option<u32>, owner_text: Option<&str>) -> Result<(), AgentError> {
    if let Some(text) = owner_text {
        let (uid, gid) = owner(text)?;
        std::os::unix::fs::chown(path, Some(uid), Some(gid))
            .map_err(|error| error::at("set the owner of", path, &error))?;
    }
    // After the owner, since changing that one clears the set-user bits.
    if let Some(mode) = mode {
        fs::set_permissions(path, fs::Permissions::from_mode(mode & 0o7777))
            .map_err(|error| error::at("set the mode of", path, &error))?;
    }
    Ok(())
}

/// The numbers of a name, a number, or `uid:gid`.
pub fn owner(text: &str) -> Result<(u32, u32), AgentError> {
    let user = Users::load().find(text)?;
    Ok((user.uid, user.gid))
}
