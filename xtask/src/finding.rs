//! What a gate found, and where.

use std::fmt;

/// One thing to mend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Path from the top of the tree.
    pub path: String,
    /// Line in it, counted from 1; absent when the finding is about the whole file or crate.
    pub line: Option<usize>,
    /// What is wrong.
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
