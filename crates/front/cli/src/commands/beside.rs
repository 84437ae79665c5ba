//! Finds the other programs of forkd.

use std::path::{Path, PathBuf};

use anyhow::anyhow;

use crate::error::CliError;

/// The path of a program in the folder of this one.
pub fn beside(this: &Path, program: &str) -> Result<PathBuf, CliError> {
    let path = this.with_file_name(program);
    if path.is_file() {
        return Ok(path);
    }
    Err(CliError::from(anyhow!("{} does not exist", path.display()))
        .with_hint("`make build` builds it beside this program"))
}
