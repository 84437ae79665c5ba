//! Templates: the read side of the API, over snapshots.
//!
//! The name of a template is the tag of a snapshot, or a name that the daemon was told with `--e2b-template`. A name space
//! (`team/`) and a version (`:default`) are accepted and ignored.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use forkd_api::SnapshotInfo;
use forkd_edge::auth::Actor;
use forkd_sandboxes::ops::snapshots;
use forkd_sandboxes::owners::Access;
use forkd_types::Tag;
use serde_json::{Value, json};

use super::owned::{Caller, access};
use crate::e2b::ENVD_VERSION;
use crate::e2b::error::{Answer, Refusal};
use crate::e2b::state::E2b;
use crate::e2b::text;

/// The bare name in `team/name:version`.
fn bare(name: &str) -> &str {
    let name = name.rsplit_once('/').map_or(name, |(_, name)| name);
    name.split_once(':').map_or(name, |(name, _)| name)
}

/// The tag that a name stands for, without the names of the configuration.
pub fn parse(name: &str) -> Option<Tag> {
    bare(name).parse().ok()
}

/// The refusal of a text that cannot be a name.
pub fn invalid(name: &str) -> Refusal {
    let name: String = name.chars().take(80).collect();
    Refusal::bad(format!("{name:?} is not a valid name"))
}

/// The refusal of a name that no template has.
pub fn not_found(name: &str) -> Refusal {
    let name: String = name.chars().take(80).collect();
    Refusal::new(
        StatusCode::NOT_FOUND,
        format!(
            "template {name} was not found (a template is a snapshot of that name, or a name given with --e2b-template)"
        ),
    )
}

/// The snapshot that a template stands for, if the caller may use it.
pub fn resolve(e2b: &E2b, actor: &Actor, name: &str) -> Answer<Tag> {
    let named = e2b.config.templates.get(bare(name)).cloned();
    let tag = named
        .or_else(|| parse(name))
        .ok_or_else(|| not_found(name))?;
    let exists = e2b.app.store.contains(&tag) || e2b.app.writing.is_writing(&tag);
    if !exists || access(&e2b.app, actor, &tag) == Access::None {
        return Err(not_found(name));
    }
    Ok(tag)
}

/// The names of a snapshot: those of the configuration, and its tag.
fn names(e2b: &E2b, tag: &str) -> Vec<String> {
    let given = e2b.config.templates.iter();
    let given = given.filter(|(_, to)| to.as_str() == tag);
    let mut names: Vec<String> = given.map(|(name, _)| name.clone()).collect();
    if !names.iter().any(|name| name == tag) {
        names.push(tag.to_owned());
    }
    names
}

fn shown(e2b: &E2b, info: &SnapshotInfo) -> Value {
    let at = text::time(info.created_at_unix);
    let public = info
        .tag
        .parse()
        .ok()
        .and_then(|tag| e2b.app.owners.get(&tag))
        .is_some_and(|found| found.public);
    let names = names(e2b, &info.tag);
    json!({
        "templateID": info.tag,
        "buildID": info.tag,
        "cpuCount": info.vcpus.unwrap_or(1),
        "memoryMB": info.memory_mib.unwrap_or(0),
        "diskSizeMB": 0,
        "public": public,
        "aliases": names,
        "names": names,
        "createdAt": at,
        "updatedAt": at,
        "createdBy": null,
        "lastSpawnedAt": null,
        "spawnCount": 0,
        "buildCount": 1,
        "buildStatus": "ready",
        "envdVersion": ENVD_VERSION,
    })
}

async fn visible(e2b: &Arc<E2b>, actor: &Actor) -> Answer<Vec<SnapshotInfo>> {
    let mut all = snapshots::list(&e2b.app).await?;
    all.retain(|info| {
        info.status == forkd_api::SnapshotStatus::Ready
            && info
                .tag
                .parse()
                .is_ok_and(|tag| access(&e2b.app, actor, &tag) != Access::None)
    });
    Ok(all)
}

/// Every snapshot that the caller may start sandboxes from.
pub async fn list(State(e2b): State<Arc<E2b>>, Caller(actor): Caller) -> Answer<Json<Vec<Value>>> {
    let all = visible(&e2b, &actor).await?;
    Ok(Json(all.iter().map(|info| shown(&e2b, info)).collect()))
}

/// Describes one template by its name.
pub async fn get(
    State(e2b): State<Arc<E2b>>,
    Caller(actor): Caller,
    Path(name): Path<String>,
) -> Answer<Json<Value>> {
    let tag = resolve(&e2b, &actor, &name)?;
    let all = visible(&e2b, &actor).await?;
    let found = all.iter().find(|info| info.tag == tag.as_str());
    let info = found.ok_or_else(|| not_found(&name))?;
    Ok(Json(shown(&e2b, info)))
}

/// Whether a name is taken.
pub async fn alias(
    State(e2b): State<Arc<E2b>>,
    Caller(actor): Caller,
    Path(name): Path<String>,
) -> Answer<Json<Value>> {
    let tag = resolve(&e2b, &actor, &name)?;
    let public = e2b.app.owners.get(&tag).is_some_and(|found| found.public);
    Ok(Json(json!({"templateID": tag, "public": public})))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_space_and_a_version_are_ignored() {
        for name in ["base", "team/base", "team/base:default", "base:v1"] {
            assert_eq!(parse(name).unwrap().as_str(), "base", "{name}");
        }
        for bad in ["", "a b", "team/", ":x", "../x/.."] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
