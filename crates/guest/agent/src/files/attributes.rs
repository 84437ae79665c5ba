//! Extended attributes of files, in the space that belongs to users.
//!
//! The agent reads and writes only names that begin with `user.`: the other spaces change what a file may do. Values are
//! printable text, because answers are JSON.

use std::collections::BTreeMap;
use std::path::Path;

use forkd_guest_proto::{AgentError, Attributes};
use rustix::fs::XattrFlags;

use crate::error;

/// The space of names that users may write.
const SPACE: &str = "user.";
/// The longest list of names that the kernel returns.
const MAX_LIST: usize = 64 << 10;
/// The most bytes of names and values that a file reports, and that a request may write.
pub const MAX_BYTES: usize = 4 << 10;

/// The attributes whose names begin with a prefix. A file system without attributes has none.
pub fn read(path: &Path, prefix: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    if !prefix.starts_with(SPACE) {
        return found;
    }
    let mut total = 0;
    for name in names(path, prefix) {
        let mut value = [0; MAX_BYTES];
        let Ok(length) = rustix::fs::lgetxattr(path, name.as_str(), &mut value) else {
            continue;
        };
        let Ok(value) = std::str::from_utf8(&value[..length]) else {
            continue;
        };
        let short = name[prefix.len()..].to_owned();
        total += short.len() + value.len();
        if total > MAX_BYTES {
            break;
        }
        if !value.contains(char::is_control) && !short.contains(char::is_control) {
            found.insert(short, value.to_owned());
        }
    }
    found
}

/// Whole names with a prefix, in order.
fn names(path: &Path, prefix: &str) -> Vec<String> {
    let mut list = vec![0; MAX_LIST];
    let Ok(length) = rustix::fs::llistxattr(path, &mut list[..]) else {
        return Vec::new();
    };
    let names = list[..length].split(|byte| *byte == 0);
    let mut names: Vec<String> = names
        .filter_map(|name| std::str::from_utf8(name).ok())
        .filter(|name| name.len() > prefix.len() && name.starts_with(prefix))
        .map(str::to_owned)
        .collect();
    names.sort_unstable();
    names
}

/// Gives a file these attributes, and removes others of the same prefix.
pub fn write(path: &Path, wanted: &Attributes) -> Result<(), AgentError> {
    let prefix = &wanted.prefix;
    let size: usize = wanted.values.iter().map(|(k, v)| k.len() + v.len()).sum();
    let printable = |text: &str| !text.contains(char::is_control);
    if !prefix.starts_with(SPACE) || !printable(prefix) {
        return Err(error::bad(format!(
            "{prefix:?} does not begin with {SPACE:?}: other attributes cannot be written"
        )));
    }
    if size > MAX_BYTES {
        return Err(error::bad(format!(
            "the attributes have {size} bytes, and at most {MAX_BYTES} are allowed"
        )));
    }
    if let Some((name, _)) = wanted
        .values
        .iter()
        .find(|(name, value)| name.is_empty() || !printable(name) || !printable(value))
    {
        return Err(error::bad(format!(
            "the attribute {name:?} has no name, or is not printable text"
        )));
    }
    let failed = |errno: rustix::io::Errno| error::at("set attributes of", path, &errno.into());
    for name in names(path, prefix) {
        if !wanted.values.contains_key(&name[prefix.len()..]) {
            rustix::fs::lremovexattr(path, name.as_str()).map_err(failed)?;
        }
    }
    for (name, value) in &wanted.values {
        let name = format!("{prefix}{name}");
        rustix::fs::lsetxattr(path, name.as_str(), value.as_bytes(), XattrFlags::empty())
            .map_err(failed)?;
    }
    Ok(())
}
