//! The files of the tree, as git sees them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

/// A text file and its path from the top of the tree.
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

    /// Code that only tests run: a folder named `tests` or `benches`, a file named `tests.rs`, or the fuzz targets.
    pub fn is_test_code(&self) -> bool {
        let mut parts = self.path.split('/');
        parts.any(|part| matches!(part, "tests" | "benches" | "fuzz" | "tests.rs"))
    }
}

/// The working tree: everything tracked, or new and not ignored.
pub struct Tree {
    pub root: PathBuf,
    pub files: Vec<SourceFile>,
}

impl Tree {
    /// The tree this program was built from.
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
            // A deleted file is still listed, a binary one is none of our business.
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
