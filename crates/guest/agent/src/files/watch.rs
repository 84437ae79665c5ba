//! Streams of changes below a directory.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use forkd_guest_proto::{AgentError, ErrorCode, Event, WatchChange, WatchEvent, WatchRequest};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};

use super::{absolute, blocking};
use crate::conn::Stream;
use crate::error;

/// Directories that one request may watch.
const MAX_WATCHES: usize = 8192;
/// Changes per event frame.
const PART: usize = 50;

/// Reports changes until the host cancels.
pub async fn watch(stream: &Stream, request: WatchRequest) -> Result<(), AgentError> {
    let root = absolute(&request.path)?;
    let mut watcher = blocking(move || Watcher::new(root, request.recursive)).await?;
    let failed = |error: io::Error| error::io("cannot read file changes", &error);
    let fd = watcher
        .fd
        .try_clone()
        .and_then(crate::sys::watched)
        .map_err(failed)?;
    stream
        .send_event(&Event::Watching)
        .await
        .map_err(error::closed)?;
    loop {
        let mut ready = fd.readable().await.map_err(failed)?;
        let changes = watcher.read().map_err(failed)?;
        ready.clear_ready();
        for part in changes.chunks(PART) {
            let event = Event::Changes {
                changes: part.to_vec(),
            };
            stream.send_event(&event).await.map_err(error::closed)?;
        }
    }
}

struct Watcher {
    fd: OwnedFd,
    root: PathBuf,
    recursive: bool,
    directories: HashMap<i32, PathBuf>,
}

impl Watcher {
    fn new(root: PathBuf, recursive: bool) -> Result<Self, AgentError> {
        let fd = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)
            .map_err(|errno| error::io("cannot watch files", &errno.into()))?;
        let mut watcher = Self {
            fd,
            root,
            recursive,
            directories: HashMap::new(),
        };
        watcher
            .add(Path::new(""))
            .map_err(|error| error::at("watch", &watcher.root, &error))?;
        if watcher.directories.len() >= MAX_WATCHES {
            return Err(AgentError::new(
                ErrorCode::Limit,
                format!(
                    "{} holds more than {MAX_WATCHES} directories",
                    watcher.root.display()
                ),
            ));
        }
        Ok(watcher)
    }

    fn add(&mut self, relative: &Path) -> io::Result<()> {
        let flags = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE
            | WatchFlags::EXCL_UNLINK;
        let full = join(&self.root, relative);
        let id = inotify::add_watch(&self.fd, &full, flags)?;
        self.directories.insert(id, relative.to_path_buf());
        if !self.recursive || !full.is_dir() {
            return Ok(());
        }
        for entry in std::fs::read_dir(&full)?.flatten() {
            if self.directories.len() >= MAX_WATCHES {
                break;
            }
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                // It may be gone again already.
                let _ = self.add(&relative.join(entry.file_name()));
            }
        }
        Ok(())
    }

    fn read(&mut self) -> io::Result<Vec<WatchEvent>> {
        let mut changes = Vec::new();
        let mut new_directories = Vec::new();
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(&self.fd, &mut buffer);
        loop {
            let event = match reader.next() {
                Ok(event) => event,
                Err(rustix::io::Errno::WOULDBLOCK) => break,
                Err(errno) => return Err(errno.into()),
            };
            let flags = event.events();
            if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                changes.push(WatchEvent {
                    change: WatchChange::Overflow,
                    path: String::new(),
                });
                continue;
            }
            let Some(directory) = self.directories.get(&event.wd()) else {
                continue;
            };
            let path = match event.file_name() {
                Some(name) => directory.join(&*name.to_string_lossy()),
                None => directory.clone(),
            };
            if flags.contains(ReadFlags::IGNORED) {
                self.directories.remove(&event.wd());
                continue;
            }
            let arrived = flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO);
            if self.recursive && arrived && flags.contains(ReadFlags::ISDIR) {
                new_directories.push(path.clone());
            }
            if let Some(change) = change(flags) {
                // A directory that goes away is reported by its parent too.
                let by_parent =
                    flags.contains(ReadFlags::DELETE_SELF) && !path.as_os_str().is_empty();
                if !by_parent {
                    changes.push(WatchEvent {
                        change,
                        path: path.to_string_lossy().into_owned(),
                    });
                }
            }
        }
        for directory in new_directories {
            if self.directories.len() < MAX_WATCHES && self.add(&directory).is_ok() {
                report_content(&self.root, &directory, &mut changes);
            }
        }
        Ok(changes)
    }
}

/// The entries that a new directory got before it was watched.
fn report_content(root: &Path, directory: &Path, changes: &mut Vec<WatchEvent>) {
    for entry in std::fs::read_dir(join(root, directory))
        .into_iter()
        .flatten()
        .flatten()
        .take(1000)
    {
        let path = directory.join(entry.file_name());
        changes.push(WatchEvent {
            change: WatchChange::Created,
            path: path.to_string_lossy().into_owned(),
        });
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            report_content(root, &path, changes);
        }
    }
}

fn join(root: &Path, relative: &Path) -> PathBuf {
    if relative.as_os_str().is_empty() {
        root.to_path_buf()
    } else {
        root.join(relative)
    }
}

fn change(flags: ReadFlags) -> Option<WatchChange> {
    let table = [
        (ReadFlags::CREATE, WatchChange::Created),
        (ReadFlags::MODIFY, WatchChange::Modified),
        (ReadFlags::CLOSE_WRITE, WatchChange::Written),
        (ReadFlags::ATTRIB, WatchChange::Attributes),
        (ReadFlags::DELETE, WatchChange::Removed),
        (ReadFlags::DELETE_SELF, WatchChange::Removed),
        (ReadFlags::MOVED_TO, WatchChange::MovedIn),
        (ReadFlags::MOVED_FROM, WatchChange::MovedOut),
    ];
    table
        .iter()
        .find(|(flag, _)| flags.intersects(*flag))
        .map(|(_, change)| *change)
}
