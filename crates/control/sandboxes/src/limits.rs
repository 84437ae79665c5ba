//! Whether there is room for more.

use forkd_api::ErrorCode;

use crate::app::App;
use crate::error::Error;
use crate::ops::spawn::CreateRequest;

/// Host memory a new child needs at least, in MiB: what it writes while it becomes ready, and the VMM.
const CHILD_MIB: u64 = 12;

/// Refuses what would go over a limit, and says which.
pub fn check(app: &App, request: &CreateRequest) -> Result<(), Error> {
    let count = app.sandboxes.len();
    if count + request.count > app.config.max_sandboxes {
        return Err(too_many(count, app.config.max_sandboxes));
    }
    let mine = app
        .sandboxes
        .list()
        .iter()
        .filter(|sandbox| sandbox.record().owner == request.owner)
        .count();
    let limit = app.config.max_sandboxes_per_token;
    if mine + request.count > limit {
        return Err(Error::hinted(
            ErrorCode::LimitReached,
            format!(
                "{} has {mine} sandboxes, {limit} is the limit of one token",
                request.owner
            ),
            "delete some, or start the daemon with a higher --max-sandboxes-per-token",
        ));
    }
    let needed = app.config.reserve_mib + CHILD_MIB * request.count as u64;
    match available_mib() {
        Some(available) if available < needed => Err(Error::hinted(
            ErrorCode::LimitReached,
            format!("{available} MiB of host memory are free, {needed} MiB are needed"),
            "delete sandboxes, or start the daemon with a lower --reserve-mib",
        )),
        _ => Ok(()),
    }
}

/// The refusal when there are too many sandboxes.
pub fn too_many(count: usize, limit: usize) -> Error {
    Error::hinted(
        ErrorCode::LimitReached,
        format!("there are {count} sandboxes, {limit} is the limit"),
        "delete some, or start the daemon with a higher --max-sandboxes",
    )
}

/// Memory that programs could still get.
pub fn available_mib() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib / 1024)
}
