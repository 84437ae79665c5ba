//! Listing directories, in parts.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use forkd_guest_proto::{AgentError, Entry, Event, ListRequest, ListResult};

use super::{absolute, attributes, blocking, meta};
use crate::conn::Stream;
use crate::error;
use crate::process::users::Users;

/// The longest listing, whatever the request says.
const MAX_ENTRIES: u64 = 1_000_000;
/// How many levels at most.
const MAX_DEPTH: u32 = 64;
/// Entries per event; with the longest names they still fit into a frame.
const PART: usize = 50;
/// Bytes of extended attributes after which an event ends, for the same reason.
const PART_ATTRIBUTES: usize = 8 << 10;

/// Lists a directory, parents before children and names in order.
pub async fn list(stream: &Stream, request: ListRequest) -> Result<ListResult, AgentError> {
    let limit = request.limit.unwrap_or(MAX_ENTRIES).min(MAX_ENTRIES);
    let mut walk = Walk::new(absolute(&request.path)?, request.depth.clamp(1, MAX_DEPTH));
    walk.attributes = request.attributes;
    let mut count = 0;
    loop {
        let (walked, part) = blocking(move || {
            let part = walk.next_part()?;
            Ok((walk, part))
        })
        .await?;
        walk = walked;
        if part.is_empty() {
            return Ok(ListResult {
                count,
                truncated: false,
            });
        }
        let room = usize::try_from(limit - count).unwrap_or(usize::MAX);
        let truncated = part.len() > room;
        let entries: Vec<_> = part.into_iter().take(room).collect();
        count += entries.len() as u64;
        if !entries.is_empty() {
            stream
                .send_event(&Event::Entries { entries })
                .await
                .map_err(error::closed)?;
        }
        if truncated {
            return Ok(ListResult {
                count,
                truncated: true,
            });
        }
    }
}

struct Walk {
    root: PathBuf,
    depth: u32,
    directories: VecDeque<(PathBuf, u32)>,
    names: VecDeque<PathBuf>,
    level: u32,
    started: bool,
    users: Users,
    /// The prefix of the extended attributes that entries report.
    attributes: Option<String>,
}

impl Walk {
    fn new(root: PathBuf, depth: u32) -> Self {
        let directories = VecDeque::from([(PathBuf::new(), 1)]);
        let users = Users::load();
        Self {
            root,
            depth,
            directories,
            names: VecDeque::new(),
            level: 0,
            started: false,
            users,
            attributes: None,
        }
    }

    fn next_part(&mut self) -> Result<Vec<Entry>, AgentError> {
        let mut part: Vec<Entry> = Vec::new();
        let mut attributes = 0;
        while part.len() < PART && attributes < PART_ATTRIBUTES {
            if let Some(path) = self.names.pop_front() {
                if let Some(entry) = self.entry(&path) {
                    let values = entry.info.attributes.iter();
                    attributes += values.map(|(k, v)| k.len() + v.len()).sum::<usize>();
                    part.push(entry);
                }
                continue;
            }
            let Some((directory, level)) = self.directories.pop_front() else {
                break;
            };
            self.level = level;
            match names(&self.root.join(&directory), &directory) {
                Ok(names) => self.names = names,
                // What vanishes or is closed to us below the top is not worth losing the rest for.
                Err(_) if self.started => {}
                Err(error) => return Err(error::at("list", &self.root, &error)),
            }
            self.started = true;
        }
        Ok(part)
    }

    fn entry(&mut self, path: &Path) -> Option<Entry> {
        let full = self.root.join(path);
        let found = fs::symlink_metadata(&full).ok()?;
        if found.is_dir() && self.level < self.depth {
            self.directories
                .push_back((path.to_path_buf(), self.level + 1));
        }
        let mut info = meta::info(&full, &found);
        info.user = self.users.user_name(info.uid).map(ToOwned::to_owned);
        info.group = self.users.group_name(info.gid).map(ToOwned::to_owned);
        if let Some(prefix) = &self.attributes {
            info.attributes = attributes::read(&full, prefix);
        }
        Some(Entry {
            path: path.to_string_lossy().into_owned(),
            info,
        })
    }
}

fn names(full: &Path, relative: &Path) -> io::Result<VecDeque<PathBuf>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(full)? {
        names.push(relative.join(entry?.file_name()));
        if names.len() as u64 >= MAX_ENTRIES {
            break;
        }
    }
    names.sort_unstable();
    Ok(names.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_goes_as_deep_as_asked() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("b/c/d")).unwrap();
        fs::write(root.path().join("a"), "1").unwrap();
        fs::write(root.path().join("b/x"), "22").unwrap();
        let walk = |depth| {
            let mut walk = Walk::new(root.path().to_path_buf(), depth);
            walk.next_part()
                .unwrap()
                .into_iter()
                .map(|entry| entry.path)
                .collect::<Vec<_>>()
        };
        assert_eq!(walk(1), ["a", "b"]);
        assert_eq!(walk(2), ["a", "b", "b/c", "b/x"]);
        assert_eq!(walk(9), ["a", "b", "b/c", "b/x", "b/c/d"]);
    }
}
