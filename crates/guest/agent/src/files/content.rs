//! Reading and writing file content.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forkd_guest_proto::{
    AgentError, ErrorCode, Event, ReadRequest, ReadResult, WriteRequest, WriteResult, channel,
    frame::DATA_CHUNK,
};

use super::{absolute, blocking, meta};
use crate::conn::Stream;
use crate::error;

/// Sends the content of a file.
pub async fn read(stream: &Stream, request: ReadRequest) -> Result<ReadResult, AgentError> {
    let path = absolute(&request.path)?;
    let (file, info) = blocking(move || {
        let file = open_for_reading(&path)?;
        let found = file
            .metadata()
            .map_err(|error| error::at("look at", &path, &error))?;
        if found.is_dir() {
            let message = format!("{} is a directory", path.display());
            return Err(AgentError::new(ErrorCode::IsDirectory, message));
        }
        let mut file = file;
        if request.offset > 0 {
            file.seek(SeekFrom::Start(request.offset))
                .map_err(|error| error::at("seek in", &path, &error))?;
        }
        Ok((Arc::new(file), meta::info(&path, &found)))
    })
    .await?;
    stream
        .send_event(&Event::File(info))
        .await
        .map_err(error::closed)?;
    let mut left = request.len.unwrap_or(u64::MAX);
    let mut sent = 0u64;
    while left > 0 {
        let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(DATA_CHUNK);
        let credit = stream
            .reserve(channel::BULK, wanted)
            .await
            .map_err(error::closed)?;
        let file = Arc::clone(&file);
        let bytes = blocking(move || {
            let mut bytes = Vec::with_capacity(credit);
            let mut source = (&*file).take(credit as u64);
            source
                .read_to_end(&mut bytes)
                .map_err(|error| error::io("cannot read the file", &error))?;
            Ok(bytes)
        })
        .await?;
        stream.unreserve(channel::BULK, credit, bytes.len());
        if bytes.is_empty() {
            break;
        }
        stream
            .send_reserved(channel::BULK, &bytes)
            .await
            .map_err(error::closed)?;
        sent += bytes.len() as u64;
        left -= bytes.len() as u64;
    }
    stream
        .send_end(channel::BULK)
        .await
        .map_err(error::closed)?;
    Ok(ReadResult { bytes: sent })
}

fn open_for_reading(path: &Path) -> Result<File, AgentError> {
    // Without this flag opening a pipe waits for a writer that may never come.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path);
    let file = file.map_err(|error| error::at("open", path, &error))?;
    let kind = file
        .metadata()
        .map_err(|error| error::at("look at", path, &error))?
        .file_type();
    if kind.is_fifo() || kind.is_socket() {
        return Err(error::bad(format!("{} is not a file", path.display())));
    }
    Ok(file)
}

/// Writes the stream's input to a file.
pub async fn write(stream: &Stream, request: WriteRequest) -> Result<WriteResult, AgentError> {
    let target = Arc::new(blocking(move || Target::open(request)).await?);
    let mut at = target.start;
    while let Some(bytes) = stream.receive().await {
        let target = Arc::clone(&target);
        at = blocking(move || target.write(at, &bytes)).await?;
    }
    if !stream.input_is_complete() {
        return Err(AgentError::new(
            ErrorCode::Cancelled,
            "the content did not come to its end",
        ));
    }
    let bytes = at - target.start;
    blocking(move || target.finish()).await?;
    Ok(WriteResult { bytes })
}

/// A file being written. One that is to appear whole is removed again unless it is finished.
struct Target {
    file: File,
    path: PathBuf,
    temporary: Option<PathBuf>,
    start: u64,
    append: bool,
    sync: bool,
}

impl Target {
    fn open(request: WriteRequest) -> Result<Self, AgentError> {
        let path = absolute(&request.path)?;
        if request.parents
            && let Some(parent) = path.parent()
        {
            fs::create_dir_all(parent).map_err(|error| error::at("make", parent, &error))?;
        }
        if request.atomic && (request.append || request.offset > 0 || request.create_new) {
            return Err(error::bad("an atomic write replaces the whole file"));
        }
        if request.append && request.offset > 0 {
            return Err(error::bad("append and offset exclude each other"));
        }
        let (file, temporary) = if request.atomic {
            open_beside(&path, &request)?
        } else {
            (open_itself(&path, &request)?, None)
        };
        let target = Self {
            file,
            path,
            temporary,
            start: request.offset,
            append: request.append,
            sync: request.sync,
        };
        if let Some(mode) = request.mode {
            let permissions = fs::Permissions::from_mode(mode & 0o7777);
            target
                .file
                .set_permissions(permissions)
                .map_err(|error| error::at("set the mode of", &target.path, &error))?;
        }
        if let Some(owner) = &request.owner {
            let (uid, gid) = meta::owner(owner)?;
            std::os::unix::fs::fchown(&target.file, Some(uid), Some(gid))
                .map_err(|error| error::at("set the owner of", &target.path, &error))?;
        }
        Ok(target)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<u64, AgentError> {
        let written = if self.append {
            (&self.file).write_all(bytes)
        } else {
            self.file.write_all_at(bytes, at)
        };
        written.map_err(|error| error::at("write to", &self.path, &error))?;
        Ok(at + bytes.len() as u64)
    }

    fn finish(&self) -> Result<(), AgentError> {
        if self.sync {
            self.file
                .sync_all()
                .map_err(|error| error::at("sync", &self.path, &error))?;
        }
        if let Some(temporary) = &self.temporary {
            fs::rename(temporary, &self.path)
                .map_err(|error| error::at("replace", &self.path, &error))?;
        }
        if self.sync
            && let Some(parent) = self.path.parent()
        {
            let synced = File::open(parent).and_then(|parent| parent.sync_all());
            synced.map_err(|error| error::at("sync", parent, &error))?;
        }
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            let _ = fs::remove_file(temporary);
        }
    }
}

/// Replaces a small file of the agent's own, so that readers see the old content or the new.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    fs::write(&beside, content)?;
    fs::rename(&beside, path)
}

fn open_itself(path: &Path, request: &WriteRequest) -> Result<File, AgentError> {
    let whole = !request.append && request.offset == 0 && request.truncate;
    let mut options = OpenOptions::new();
    options
        .create(request.create)
        .create_new(request.create_new)
        .mode(0o644);
    options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    if request.append {
        options.append(true);
    } else {
        options.write(true).truncate(whole);
    }
    let file = options
        .open(path)
        .map_err(|error| match error.raw_os_error() {
            Some(libc::EISDIR) => AgentError::new(
                ErrorCode::IsDirectory,
                format!("{} is a directory", path.display()),
            ),
            _ => error::at("open", path, &error),
        })?;
    Ok(file)
}

fn open_beside(path: &Path, request: &WriteRequest) -> Result<(File, Option<PathBuf>), AgentError> {
    let old = fs::metadata(path).ok();
    if old.as_ref().is_some_and(|old| old.is_dir()) {
        return Err(AgentError::new(
            ErrorCode::IsDirectory,
            format!("{} is a directory", path.display()),
        ));
    }
    let name = path
        .file_name()
        .ok_or_else(|| error::bad(format!("{} has no name", path.display())))?;
    for attempt in 0u32..100 {
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.{attempt}.new", std::process::id()));
        let temporary = path.with_file_name(hidden);
        match OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)
        {
            Ok(file) => {
                let mode = request
                    .mode
                    .or(old.as_ref().map(|old| old.mode()))
                    .unwrap_or(0o644);
                let _ = file.set_permissions(fs::Permissions::from_mode(mode & 0o7777));
                if let Some(old) = &old {
                    let _ = std::os::unix::fs::fchown(&file, Some(old.uid()), Some(old.gid()));
                }
                return Ok((file, Some(temporary)));
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error::at("make a file beside", path, &error)),
        }
    }
    Err(AgentError::new(
        ErrorCode::Exists,
        format!("no free name beside {}", path.display()),
    ))
}
