//! Trees of files in a fake guest: packed, unpacked and mounted.
//!
//! A bind mount is a copy: a fake guest has files by path and nothing else.

use std::io::Read;

use forkd_guest_proto::{
    AgentError, ArchiveResult, ErrorCode, MountRequest, MountResult, MountSource, PackRequest,
    UnpackRequest,
};

use super::agent::{Answer, not_found, ok};
use super::guest::Guest;

fn failed(error: impl std::fmt::Display) -> AgentError {
    AgentError::new(ErrorCode::Io, error.to_string())
}

/// Files at or below a path, with the rest of their names.
fn below(guest: &Guest, path: &str) -> Vec<(String, Vec<u8>)> {
    let path = path.trim_end_matches('/');
    let found = guest.files.iter().filter_map(|(name, content)| {
        let rest = name.strip_prefix(path)?;
        let inside = rest.is_empty() || rest.starts_with('/');
        inside.then(|| (rest.to_owned(), content.clone()))
    });
    found.collect()
}

pub(super) fn pack(
    guest: &Guest,
    request: &PackRequest,
) -> Result<(Vec<u8>, ArchiveResult), AgentError> {
    let mut archive = tar::Builder::new(Vec::new());
    let mut done = ArchiveResult::default();
    for item in &request.items {
        let found = below(guest, &item.from);
        if found.is_empty() && item.from != "/" {
            return Err(not_found(&item.from));
        }
        for (rest, content) in found {
            let full = format!("{}{rest}", item.from.trim_end_matches('/'));
            let excluded = |path: &String| full.starts_with(&format!("{path}/"));
            if request.exclude.iter().any(excluded) {
                continue;
            }
            let name = format!("{}{rest}", item.to);
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(0);
            let name = name.trim_start_matches('/');
            archive
                .append_data(&mut header, name, content.as_slice())
                .map_err(failed)?;
            done.entries += 1;
            done.bytes += content.len() as u64;
        }
    }
    Ok((archive.into_inner().map_err(failed)?, done))
}

pub(super) fn unpack(guest: &mut Guest, request: &UnpackRequest, bytes: &[u8]) -> Answer {
    let mut done = ArchiveResult::default();
    let mut archive = tar::Archive::new(bytes);
    for entry in archive.entries().map_err(failed)? {
        let mut entry = entry.map_err(failed)?;
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let name = entry.path().map_err(failed)?.display().to_string();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).map_err(failed)?;
        done.entries += 1;
        done.bytes += content.len() as u64;
        let path = format!("{}/{name}", request.path.trim_end_matches('/'));
        guest.files.insert(path, content);
    }
    ok(done)
}

pub(super) fn mount(guest: &mut Guest, request: &MountRequest) -> Answer {
    if let MountSource::Bind(source) = &request.what {
        for (rest, content) in below(guest, source) {
            let path = format!("{}{rest}", request.target);
            guest.files.insert(path, content);
        }
    }
    ok(MountResult::default())
}

/// Removes a file or everything below a folder.
pub(super) fn remove(guest: &mut Guest, path: &str) {
    let path = path.trim_end_matches('/');
    let folder = format!("{path}/");
    guest
        .files
        .retain(|name, _| name != path && !name.starts_with(&folder));
}
