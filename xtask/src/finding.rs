//! [`Finding`]: a problem that a gate reports, with its place in the tree.

use std::fmt;

/// A problem in a file, a crate or the whole tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Relative to the root of the tree, or the name of an area.
    pub path: String,
    /// Counted from 1. `None` if the finding is about a whole file or crate.
    pub line: Option<usize>,
    pub message: String,
}

impl Finding {
    pub fn in_file(path: &str, message: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line: None,
            message: message.into(),
        }
    }

    pub fn at(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line: Some(line),
            message: message.into(),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.path, self.message),
            None => write!(f, "{}: {}", self.path, self.message),
        }
    }
}
