//! Files: content in streams, everything else in one step. The work is done on helper threads, since disks
//! can take their time.

pub mod archive;
mod attributes;
mod content;
mod list;
mod meta;
mod watch;

use std::path::{Path, PathBuf};

use forkd_guest_proto::{AgentError, ErrorCode};

use crate::error;

pub use content::{read, replace, write};
pub use list::list;
pub use meta::{mkdir, remove, rename, set_attr, stat};
pub use watch::watch;

/// Runs something that may block.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, AgentError> + Send + 'static,
) -> Result<T, AgentError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(AgentError::new(
            ErrorCode::Internal,
            format!("a helper thread failed: {error}"),
        )),
    }
}

/// A path that can be given to the kernel: absolute and without zero bytes.
pub fn absolute(path: &str) -> Result<PathBuf, AgentError> {
    if !path.starts_with('/') || path.contains('\0') {
        return Err(error::bad(format!("{path:?} is not an absolute path")));
    }
    Ok(Path::new(path).to_path_buf())
}
