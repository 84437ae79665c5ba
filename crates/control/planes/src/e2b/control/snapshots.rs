//! Routes that make, list and delete snapshots of sandboxes. A snapshot is a branch, and its ID is the tag.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use forkd_sandboxes::error::Error;
use forkd_sandboxes::ops::branch::{self, Branch, Branched};
use forkd_sandboxes::ops::snapshots;
use forkd_sandboxes::owners::Access;
use forkd_sandboxes::sandbox::CutMode;
use forkd_sandboxes::trace;
use forkd_store::Deletion;
use forkd_types::Tag;

use super::Sent;
use super::owned::{Caller, Owned, access};
use super::templates;
use super::wire::{NewSnapshot, SnapshotInfo};
use crate::e2b::error::{Answer, Refusal};
use crate::e2b::state::E2b;
use crate::e2b::text;

/// Entries of a page unless the request says otherwise, and the most.
const PAGE: usize = 100;

fn shown(tag: &str) -> SnapshotInfo {
    SnapshotInfo {
        snapshot_id: tag.to_owned(),
        names: vec![tag.to_owned()],
    }
}

/// Freezes a running sandbox under a name; the sandbox goes on. A snapshot of the same name is replaced.
pub async fn create(
    State(e2b): State<Arc<E2b>>,
    Caller(actor): Caller,
    owned: Owned,
    Sent(request): Sent<NewSnapshot>,
) -> Answer<(StatusCode, Json<SnapshotInfo>)> {
    if request.memory == Some(false) {
        return Err(Refusal::bad(
            "a snapshot without memory is not supported by forkd",
        ));
    }
    let sandbox = owned.live()?;
    let tag: Option<Tag> = request
        .name
        .as_deref()
        .map(|name| templates::parse(name).ok_or_else(|| templates::invalid(name)))
        .transpose()?;
    let app = Arc::clone(&e2b.app);
    let id = sandbox.id.clone();
    let work = trace::spawn(async move {
        if let Some(tag) = &tag
            && app.store.contains(tag)
            && access(&app, &actor, tag) == Access::Own
        {
            snapshots::delete(&app, tag.clone(), Deletion::Force).await?;
        }
        let wish = Branch {
            tag,
            mode: CutMode::Diff,
            wait: true,
            parent: None,
            freeze: false,
        };
        match branch::branch(&app, &id, wish).await? {
            Branched::Ready(info) | Branched::Writing(info) => Ok::<_, Error>(info),
        }
    });
    let info = work.await.map_err(|_| Error::Task)??;
    Ok((StatusCode::CREATED, Json(shown(&info.tag))))
}

/// Snapshots that were made of sandboxes and that the caller owns.
pub async fn list(
    State(e2b): State<Arc<E2b>>,
    Caller(actor): Caller,
    RawQuery(query): RawQuery,
) -> Answer<Response> {
    let query = text::query(&query.unwrap_or_default());
    let get = |name: &str| text::value(&query, name).filter(|value| !value.is_empty());
    let limit = match get("limit") {
        None => PAGE,
        Some(limit) => limit
            .parse()
            .ok()
            .filter(|limit| (1..=PAGE).contains(limit))
            .ok_or_else(|| Refusal::bad(format!("limit is 1 to {PAGE}")))?,
    };
    let name = get("name").map(|name| templates::parse(name).map(|tag| tag.to_string()));
    let mut all = snapshots::list(&e2b.app).await?;
    all.retain(|info| {
        let Ok(tag) = info.tag.parse::<Tag>() else {
            return false;
        };
        let from = info.branched_from.as_deref();
        let sandbox = get("sandboxID").is_none_or(|wanted| from == Some(wanted));
        let named = name
            .as_ref()
            .is_none_or(|name| name.as_deref() == Some(&info.tag));
        from.is_some()
            && !tag.as_str().starts_with("ws-")
            && sandbox
            && named
            && get("nextToken").is_none_or(|after| info.tag.as_str() > after)
            && access(&e2b.app, &actor, &tag) == Access::Own
    });
    all.sort_by(|a, b| a.tag.cmp(&b.tag));
    let more = all.len() > limit;
    all.truncate(limit);
    let next = all.last().filter(|_| more).map(|last| last.tag.clone());
    let page: Vec<SnapshotInfo> = all.iter().map(|info| shown(&info.tag)).collect();
    let mut response = Json(page).into_response();
    if let Some(next) = next.and_then(|next| HeaderValue::from_str(&next).ok()) {
        response.headers_mut().insert("x-next-token", next);
    }
    Ok(response)
}

/// Deletes a snapshot of the caller.
pub async fn delete(
    State(e2b): State<Arc<E2b>>,
    Caller(actor): Caller,
    Path(name): Path<String>,
) -> Answer<StatusCode> {
    let missing = || templates::not_found(&name);
    let tag = templates::parse(&name).ok_or_else(missing)?;
    match access(&e2b.app, &actor, &tag) {
        Access::Own => {}
        Access::Use => {
            return Err(Refusal::new(
                StatusCode::FORBIDDEN,
                format!("template {tag} is public, but not yours to delete"),
            ));
        }
        Access::None => return Err(missing()),
    }
    let app = Arc::clone(&e2b.app);
    let work = trace::spawn(async move { snapshots::delete(&app, tag, Deletion::Force).await });
    work.await.map_err(|_| Error::Task)??;
    Ok(StatusCode::NO_CONTENT)
}
