//! The walls around the engine: a fault in its parsers must reach neither the host nor the daemon.
//!
//! ```text
//!   main   sockets, tables of the host are opened
//!          enter           own user ID, no capability, no path but the name servers, nothing to listen on
//!          (workers are started)
//!          restrict_calls  the system call filter, on every thread
//! ```
//!
//! The capabilities and the filter always stand: without them the program does not start. The user ID needs root, and
//! Landlock needs a kernel that has it.

pub mod self_test;

use std::path::{Path, PathBuf};

use forkd_net_proto::{MissingWall, NetWall, NetWalls};
use forkd_sys::jail::{JailError, ServiceWalls, confine_service, service_user};
use seccompiler::{BpfProgram, TargetArch, apply_filter_all_threads, compile_from_json};
use thiserror::Error;

use crate::program::resolvers;

const FILTERS: &[u8] = include_bytes!("../../../../resources/seccomp/forkd-net.json");
/// The name of the filter in the list.
const ENGINE: &str = "engine";
/// User IDs that engines may have, below those of VMMs.
const FIRST_USER: u32 = 1_899_990_000;

/// A wall that could not be put up.
#[derive(Debug, Error)]
pub enum ConfineError {
    #[error("cannot give up the rights of the program")]
    Rights(#[from] JailError),
    #[error("the list of system calls is invalid")]
    List(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("cannot restrict the system calls of the program")]
    Filter(#[source] seccompiler::Error),
}

/// Confines the process, which must have one thread and listen on `socket` already.
pub fn enter(socket: &Path) -> Result<NetWalls, ConfineError> {
    let folder = resolvers_folder();
    let readable: Vec<&Path> = folder.iter().map(PathBuf::as_path).collect();
    let ServiceWalls { user, landlock } =
        confine_service(service_user(FIRST_USER, socket), &readable)?;
    let mut walls = NetWalls {
        standing: vec![NetWall::Capabilities, NetWall::Seccomp],
        missing: Vec::new(),
    };
    for (wall, found) in [(NetWall::User, user), (NetWall::Landlock, landlock)] {
        match found {
            Ok(()) => walls.standing.push(wall),
            Err(reason) => walls.missing.push(MissingWall { wall, reason }),
        }
    }
    Ok(walls)
}

/// Restricts every thread of the process to the system calls of the engine. Any other call ends the process.
pub fn restrict_calls() -> Result<(), ConfineError> {
    apply_filter_all_threads(&filter()?).map_err(ConfineError::Filter)
}

fn filter() -> Result<BpfProgram, ConfineError> {
    let invalid = |error: &str| ConfineError::List(error.to_owned().into());
    let mut filters = compile_from_json(FILTERS, TargetArch::x86_64)
        .map_err(|error| ConfineError::List(Box::new(error)))?;
    filters
        .remove(ENGINE)
        .ok_or_else(|| invalid("it has no filter of the engine"))
}

/// The folder of the list of name servers. A folder, because the list is replaced and not written.
fn resolvers_folder() -> Option<PathBuf> {
    let list = std::fs::canonicalize(resolvers::LIST).ok()?;
    list.parent().map(Path::to_owned)
}
