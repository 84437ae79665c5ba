//! The choice of an engine.
//!
//! A snapshot names its engine, and its children run on that engine: machine state is private to the engine that wrote
//! it. Only a new parent has a choice. [`for_parent`] and [`for_children`] are the two places that decide it, and both
//! refuse an engine that `forkd-spawn` has no program for.

use forkd_api::ErrorCode;
use forkd_types::{Engine, Tag};

use super::spawn::Launcher;
use crate::error::Error;

/// The engine of a parent: the one that the request names, or forkd's own.
pub async fn for_parent(launcher: &Launcher, wanted: Option<Engine>) -> Result<Engine, Error> {
    let wanted = wanted.unwrap_or(Engine::FORKD);
    let have = launcher.engines().await?;
    if have.contains(&wanted) {
        return Ok(wanted);
    }
    Err(Error::hinted(
        ErrorCode::Unsupported,
        format!("this daemon has no engine {wanted}; it has {}", list(&have)),
        remedy(wanted),
    ))
}

/// The engine of the children of a snapshot: that of the snapshot.
pub async fn for_children(launcher: &Launcher, tag: &Tag, engine: Engine) -> Result<Engine, Error> {
    let have = launcher.engines().await?;
    if have.contains(&engine) {
        return Ok(engine);
    }
    Err(Error::hinted(
        ErrorCode::SnapshotIncompatible,
        format!(
            "snapshot {tag} was made by the engine {engine}, this daemon has {}",
            list(&have)
        ),
        remedy(engine),
    ))
}

/// Steps that give a daemon the engine.
fn remedy(engine: Engine) -> String {
    if engine == Engine::FIRECRACKER {
        return "install firecracker on PATH or start the daemon with --firecracker PATH; a forkd-spawn that runs \
                already keeps its engines until it is restarted"
            .to_owned();
    }
    format!("build the snapshot again on an engine that this daemon has, not {engine}")
}

fn list(engines: &[Engine]) -> String {
    let names: Vec<&str> = engines.iter().map(Engine::as_str).collect();
    names.join(", ")
}
