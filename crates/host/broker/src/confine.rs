//! The walls around the broker: bytes of guests and of upstreams must reach neither the host nor the values of others.
//!
//! ```text
//!   main   socket and roots are opened
//!          enter           own user ID, no capability, no path, nothing to listen on
//!          (workers are started)
//!          restrict_calls  the system call filter, on every thread
//! ```
//!
//! The filter has no `socket`, `connect` or `open`: every connection of the broker comes from the engine. Capabilities and
//! filter always stand; the user ID needs root, and Landlock needs a kernel that has it.

pub mod self_test;

use std::path::Path;

use forkd_net_proto::{MissingWall, NetWall, NetWalls};
use forkd_sys::jail::{JailError, ServiceWalls, confine_service, service_user};
use seccompiler::{BpfProgram, TargetArch, apply_filter_all_threads, compile_from_json};
use thiserror::Error;

const FILTERS: &[u8] = include_bytes!("../../../../resources/seccomp/forkd-broker.json");
/// The name of the filter in the list.
const BROKER: &str = "broker";
/// User IDs that brokers may have, between those of engines and those of VMMs.
const FIRST_USER: u32 = 1_899_992_000;

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
    let ServiceWalls { user, landlock } = confine_service(service_user(FIRST_USER, socket), &[])?;
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

/// Restricts every thread of the process to the system calls of the broker. Any other call ends the process.
pub fn restrict_calls() -> Result<(), ConfineError> {
    apply_filter_all_threads(&filter()?).map_err(ConfineError::Filter)
}

fn filter() -> Result<BpfProgram, ConfineError> {
    let mut filters = compile_from_json(FILTERS, TargetArch::x86_64)
        .map_err(|error| ConfineError::List(Box::new(error)))?;
    filters
        .remove(BROKER)
        .ok_or_else(|| ConfineError::List("it has no filter of the broker".into()))
}
