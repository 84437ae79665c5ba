//! The files of the working tree, as listed by git.
//!
//! [`Tree`] holds all text files in memory. Every gate reads the same tree.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

/// A text file, with its path relative to the root of the tree.
#[derive(Debug, Clone)]
pub struct SourceFile {
    pub path: String,
    pub text: String,
}

impl SourceFile {
    pub fn extension(&self) -> &str {
        Path::new(&self.path)
            .extension()
            .and_then(|e| e.to_str())
            .unwrap_or("")
    }

    /// Whether only tests run this code: a folder named `tests` or `benches`, a file named `tests.rs`, or the
    /// fuzz targets.
    pub fn is_test_code(&self) -> bool {
        let mut parts = self.path.split('/');
        parts.any(|part| matches!(part, "tests" | "benches" | "fuzz" | "tests.rs"))
    }
}

/// The working tree: all files that are tracked, or new and not ignored.
pub struct Tree {
    pub root: PathBuf,
    pub files: Vec<SourceFile>,
}

impl Tree {
    /// The tree from which this program was built.
    pub fn of_this_workspace() -> anyhow::Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .context("xtask has no parent directory")?
            .to_owned();
        Self::read(&root)
    }

    fn read(root: &Path) -> anyhow::Result<Self> {
        let output = Command::new("git")
            .args([
                "ls-files",
                "-z",
                "--cached",
                "--others",
                "--exclude-standard",
            ])
            .current_dir(root)
            .output()
            .context("cannot run git")?;
        if !output.status.success() {
            bail!(
                "git ls-files failed: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        let mut files = Vec::new();
        for name in output
            .stdout
            .split(|byte| *byte == 0)
            .filter(|name| !name.is_empty())
        {
            let path = String::from_utf8_lossy(name).into_owned();
            // Skips deleted files, which git still lists, and binary files.
            if let Ok(text) = fs::read_to_string(root.join(&path)) {
                files.push(SourceFile { path, text });
            }
        }
        Ok(Self {
            root: root.to_owned(),
            files,
        })
    }

    #[cfg(test)]
    pub fn of(files: &[(&str, &str)]) -> Self {
        let files = files
            .iter()
            .map(|(path, text)| SourceFile {
                path: (*path).to_owned(),
                text: (*text).to_owned(),
            })
            .collect();
        Self {
            root: PathBuf::new(),
            files,
        }
    }

    /// Files with this extension.
    pub fn with_extension<'a>(
        &'a self,
        extension: &'a str,
    ) -> impl Iterator<Item = &'a SourceFile> + 'a {
        self.files
            .iter()
            .filter(move |file| file.extension() == extension)
    }
}
