//! Whether the daemon can do its work.

use std::sync::Arc;
use std::time::Duration;

use crate::app::App;
use crate::error::chain;

/// Free space below which nothing good can come, in bytes.
const LITTLE_SPACE: u64 = 64 << 20;
/// How long each part may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// What does not work, one sentence each.
pub async fn problems(app: &Arc<App>) -> Vec<String> {
    let mut found = Vec::new();
    let ask = app
        .db
        .run(|c| Ok(c.query_row("SELECT 1", [], |row| row.get::<_, i64>(0))?));
    match tokio::time::timeout(PATIENCE, ask).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => found.push(format!("the state database: {}", chain(&error))),
        Err(_) => found.push("the state database does not answer".to_owned()),
    }
    match tokio::time::timeout(PATIENCE, app.launcher.status()).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => found.push(format!("forkd-spawn: {}", chain(&error))),
        Err(_) => found.push("forkd-spawn does not answer".to_owned()),
    }
    if let Ok(fs) = rustix::fs::statvfs(app.store.layout().root())
        && fs.f_bavail.saturating_mul(fs.f_frsize) < LITTLE_SPACE
    {
        found.push("the store's file system is full".to_owned());
    }
    found
}
