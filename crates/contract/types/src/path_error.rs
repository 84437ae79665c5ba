//! An I/O error together with the path it happened on.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// A failed operation on a path. The message is `cannot <action> <path>`; the system's reason is the source.
#[derive(Debug, Error)]
#[error("cannot {action} {}", path.display())]
pub struct PathError {
    /// A verb in the infinitive: `open`, `create`, `rename to`.
    pub action: &'static str,
    pub path: PathBuf,
    pub source: io::Error,
}

impl PathError {
    /// The file system has no space left.
    pub fn is_no_space(&self) -> bool {
        self.source.kind() == io::ErrorKind::StorageFull
    }
}

/// Adds the action and the path to an I/O error: `open(p).map_err(path_error("open", p))?`.
pub fn path_error<E: Into<io::Error>>(
    action: &'static str,
    path: impl Into<PathBuf>,
) -> impl FnOnce(E) -> PathError {
    let path = path.into();
    move |source| PathError {
        action,
        path,
        source: source.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_names_the_path_and_the_source_says_why() {
        let error = path_error("open", "/a/b")(io::Error::from(io::ErrorKind::NotFound));
        assert_eq!(error.to_string(), "cannot open /a/b");
        assert_eq!(crate::chain(&error), "cannot open /a/b: entity not found");
        assert!(!error.is_no_space());
    }
}
