//! Routes that read, write, list, remove and watch files in a sandbox.
//!
//! Content is streamed in both directions. A write replaces the file as a whole or not at all.

use axum::Json;
use axum::body::{Body as RawBody, Bytes};
use axum::http::HeaderMap;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use forkd_api::{
    AttributesRequest, FileChange, FileChangeKind, FileEntry, FileKind, MakeDirRequest,
    RenameRequest, WriteResult,
};
use forkd_guest_proto as guest;
use futures::StreamExt;
use serde::Deserialize;
use utoipa::IntoParams;

use super::owned::OwnedSandbox;
use super::range;
use crate::guest::archive;
use crate::guest::files::{self, checked};
use forkd_edge::errors::Answer;
use forkd_edge::extract::{Body, Chunks, Params};
use forkd_edge::stream::{Framing, respond};
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::error::Error;

/// The file of a request.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct FileParams {
    /// An absolute path in the guest.
    #[param(max_length = 4096, pattern = "^/")]
    path: String,
}

/// Which file, and how to write it.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct WriteParams {
    /// An absolute path in the guest.
    #[param(max_length = 4096, pattern = "^/")]
    path: String,
    /// Permission bits in octal, such as `755`.
    #[param(pattern = "^[0-7]{1,4}$")]
    mode: Option<String>,
}

/// Which file, and how to remove it.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct RemoveParams {
    /// An absolute path in the guest.
    #[param(max_length = 4096, pattern = "^/")]
    path: String,
    /// With everything inside.
    #[serde(default)]
    recursive: bool,
}

/// Reads a file.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files", tag = "guest",
    params(("id" = String, Path, description = "The sandbox"), FileParams,
        ("range" = Option<String>, Header, description = "`bytes=FIRST-LAST` or `bytes=FIRST-`; other forms are ignored")), responses(
    (status = 200, description = "Its content", body = String, content_type = "application/octet-stream"),
    (status = 206, description = "The part that `range` asks for", body = String, content_type = "application/octet-stream")
))]
pub async fn read(
    OwnedSandbox(sandbox): OwnedSandbox,
    Params(params): Params<FileParams>,
    headers: HeaderMap,
) -> Answer<Response> {
    let path = checked(params.path)?;
    let range = headers
        .get(header::RANGE)
        .and_then(|value| value.to_str().ok());
    let range = range.and_then(range::parse);
    let client = sandbox.agent().await?;
    let reader = client
        .by(agent_limits::start())
        .read(guest::ReadRequest {
            path: path.clone(),
            offset: range.map_or(0, |range| range.first),
            len: range.and_then(|range| range.len()),
        })
        .await
        .map_err(Error::agent(format!("{path} cannot be read")))?;
    let size = reader.info().size;
    let regular = reader.info().kind == guest::FileKind::File;
    let content = futures::stream::unfold(Some(reader), |reader| async move {
        let mut reader = reader?;
        match reader.next().await {
            Ok(Some(bytes)) => Some((Ok(Bytes::from(bytes)), Some(reader))),
            Ok(None) => None,
            // The status is sent already; a broken body is all that is left to say.
            Err(error) => Some((Err(std::io::Error::other(error)), None)),
        }
    });
    let mut response = RawBody::from_stream(content).into_response();
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("application/octet-stream"),
    );
    // What the kernel makes up as it is read has no size to speak of.
    if regular && size > 0 {
        headers.insert("x-file-size", size.into());
        if let Some(text) = range.and_then(|range| range.describe(size)) {
            headers.insert(header::CONTENT_RANGE, text);
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
        }
    }
    Ok(response)
}

/// Writes a file, whole or not at all; missing directories are made.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/files", tag = "guest",
    params(("id" = String, Path, description = "The sandbox"), WriteParams),
    request_body(content = String, content_type = "application/octet-stream"), responses(
    (status = 200, description = "It is written", body = WriteResult)
))]
pub async fn write(
    OwnedSandbox(sandbox): OwnedSandbox,
    Params(params): Params<WriteParams>,
    mut body: Chunks,
) -> Answer<Json<WriteResult>> {
    let path = checked(params.path)?;
    let mode = params.mode.as_deref().map(files::mode).transpose()?;
    let client = sandbox.agent().await?;
    let failed = || Error::agent(format!("{path} cannot be written"));
    let mut writer = client
        .by(agent_limits::start())
        .write(guest::WriteRequest {
            path: path.clone(),
            mode,
            atomic: true,
            parents: true,
            ..guest::WriteRequest::default()
        })
        .map_err(failed())?;
    while let Some(chunk) = body.next().await? {
        writer.write(&chunk).await.map_err(failed())?;
    }
    let done = writer.finish().await.map_err(failed())?;
    Ok(Json(WriteResult {
        path,
        bytes: done.bytes,
    }))
}

/// Removes a file or directory.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/files", tag = "guest",
    params(("id" = String, Path, description = "The sandbox"), RemoveParams), responses(
    (status = 204, description = "It is gone")
))]
pub async fn remove(
    OwnedSandbox(sandbox): OwnedSandbox,
    Params(params): Params<RemoveParams>,
) -> Answer<StatusCode> {
    let path = checked(params.path)?;
    let client = sandbox.agent().await?;
    client
        .by(agent_limits::start())
        .remove(guest::RemoveRequest {
            path: path.clone(),
            recursive: params.recursive,
            missing_ok: false,
        })
        .await
        .map_err(Error::agent(format!("{path} cannot be removed")))?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lists a directory.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/list", tag = "guest",
    params(("id" = String, Path, description = "The sandbox"), FileParams), responses(
    (status = 200, description = "Its entries, in the order of their names", body = Vec<FileEntry>)
))]
pub async fn list(
    OwnedSandbox(sandbox): OwnedSandbox,
    Params(params): Params<FileParams>,
) -> Answer<Json<Vec<FileEntry>>> {
    let path = checked(params.path)?;
    let client = sandbox.agent().await?;
    let entries = files::list(&client, &path, 1, None).await?;
    let mut shown: Vec<FileEntry> = entries
        .into_iter()
        .map(|entry| shown(entry.path, entry.info))
        .collect();
    shown.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Json(shown))
}

fn shown(name: String, info: guest::FileInfo) -> FileEntry {
    FileEntry {
        name,
        kind: match info.kind {
            guest::FileKind::File => FileKind::File,
            guest::FileKind::Directory => FileKind::Dir,
            guest::FileKind::Symlink => FileKind::Symlink,
            guest::FileKind::Other => FileKind::Other,
        },
        size: info.size,
        mode: info.mode,
        modified_unix: info.modified_unix_ms / 1000,
        owner: info.user.unwrap_or_else(|| info.uid.to_string()),
        group: info.group.unwrap_or_else(|| info.gid.to_string()),
        symlink_target: info.target,
    }
}

/// The attributes of one path. A symbolic link is described itself, not its target.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/stat", tag = "guest",
    params(("id" = String, Path, description = "The sandbox"), FileParams), responses(
    (status = 200, description = "Its attributes", body = FileEntry)
))]
pub async fn stat(
    OwnedSandbox(sandbox): OwnedSandbox,
    Params(params): Params<FileParams>,
) -> Answer<Json<FileEntry>> {
    let path = checked(params.path)?;
    let info = files::stat(&sandbox.agent().await?, &path, true).await?;
    Ok(Json(shown(path, info)))
}

/// Renames a file or directory.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/files/rename", tag = "guest", request_body = RenameRequest,
    params(("id" = String, Path, description = "The sandbox")), responses(
    (status = 204, description = "It has the new path")
))]
pub async fn rename(
    OwnedSandbox(sandbox): OwnedSandbox,
    Body(request): Body<RenameRequest>,
) -> Answer<StatusCode> {
    let (from, to) = (checked(request.from)?, checked(request.to)?);
    let client = sandbox.agent().await?;
    client
        .by(agent_limits::answer())
        .rename(guest::RenameRequest {
            from: from.clone(),
            to,
            no_replace: !request.replace,
        })
        .await
        .map_err(Error::agent(format!("{from} cannot be renamed")))?;
    Ok(StatusCode::NO_CONTENT)
}

/// Changes permissions or owner.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/files/attributes", tag = "guest", request_body = AttributesRequest,
    params(("id" = String, Path, description = "The sandbox")), responses(
    (status = 204, description = "They are changed")
))]
pub async fn attributes(
    OwnedSandbox(sandbox): OwnedSandbox,
    Body(request): Body<AttributesRequest>,
) -> Answer<StatusCode> {
    let path = checked(request.path)?;
    let mode = request.mode.as_deref().map(files::mode).transpose()?;
    let client = sandbox.agent().await?;
    client
        .by(agent_limits::answer())
        .set_attr(guest::SetAttrRequest {
            path: path.clone(),
            mode,
            owner: request.owner,
            attributes: None,
        })
        .await
        .map_err(Error::agent(format!("{path} cannot be changed")))?;
    Ok(StatusCode::NO_CONTENT)
}

/// Packs the content of a directory as a tar archive; the guest needs `tar`.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/archive", tag = "guest",
    params(("id" = String, Path, description = "The sandbox"), FileParams), responses(
    (status = 200, description = "The archive; a body that breaks off is not whole", body = String, content_type = "application/x-tar")
))]
pub async fn pack(
    OwnedSandbox(sandbox): OwnedSandbox,
    Params(params): Params<FileParams>,
) -> Answer<Response> {
    let path = checked(params.path)?;
    let packing = archive::pack(&sandbox.agent().await?, &path).await?;
    let content = futures::stream::unfold(Some(packing), |packing| async move {
        let mut packing = packing?;
        match packing.next().await {
            Ok(Some(bytes)) => Some((Ok(Bytes::from(bytes)), Some(packing))),
            Ok(None) => None,
            Err(error) => Some((Err(std::io::Error::other(error)), None)),
        }
    });
    let mut response = RawBody::from_stream(content).into_response();
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("application/x-tar"),
    );
    Ok(response)
}

/// Unpacks a tar archive into a directory, which is made if it is missing; the guest needs `tar`.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/files/archive", tag = "guest",
    params(("id" = String, Path, description = "The sandbox"), FileParams),
    request_body(content = String, content_type = "application/x-tar"), responses(
    (status = 204, description = "It is unpacked")
))]
pub async fn unpack(
    OwnedSandbox(sandbox): OwnedSandbox,
    Params(params): Params<FileParams>,
    mut body: Chunks,
) -> Answer<StatusCode> {
    let path = checked(params.path)?;
    let mut unpacking = archive::unpack(&sandbox.agent().await?, &path).await?;
    while let Some(chunk) = body.next().await? {
        unpacking.write(&chunk).await?;
    }
    unpacking.finish().await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Makes a directory and its parents.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/files/mkdir", tag = "guest", request_body = MakeDirRequest,
    params(("id" = String, Path, description = "The sandbox")), responses(
    (status = 204, description = "It is there")
))]
pub async fn mkdir(
    OwnedSandbox(sandbox): OwnedSandbox,
    Body(request): Body<MakeDirRequest>,
) -> Answer<StatusCode> {
    let path = checked(request.path)?;
    let client = sandbox.agent().await?;
    client
        .by(agent_limits::answer())
        .mkdir(guest::MkdirRequest {
            path: path.clone(),
            parents: true,
            ..guest::MkdirRequest::default()
        })
        .await
        .map_err(Error::agent(format!("{path} cannot be made")))?;
    Ok(StatusCode::NO_CONTENT)
}

/// The path that a client watches.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct WatchParams {
    /// An absolute path in the guest.
    #[param(max_length = 4096, pattern = "^/")]
    path: String,
    /// With the directories inside.
    #[serde(default)]
    recursive: bool,
}

/// Tells of changes to a file or directory as they happen: NDJSON, or server-sent events if `Accept` asks for
/// them. Each line is a `FileChange`. The answer begins when the watch stands, and ends with the sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/watch", tag = "guest",
    params(("id" = String, Path, description = "The sandbox"), WatchParams), responses(
    (status = 200, description = "Changes, one a line", body = String, content_type = "application/x-ndjson")
))]
pub async fn watch(
    OwnedSandbox(sandbox): OwnedSandbox,
    Params(params): Params<WatchParams>,
    headers: HeaderMap,
) -> Answer<Response> {
    let path = checked(params.path)?;
    let client = sandbox.agent().await?;
    let watch = client
        .by(agent_limits::start())
        .watch(guest::WatchRequest {
            path: path.clone(),
            recursive: params.recursive,
        })
        .await
        .map_err(Error::agent(format!("{path} cannot be watched")))?;
    let changes = futures::stream::unfold(watch, |mut watch| async move {
        let changes = watch.next().await.ok()?;
        Some((futures::stream::iter(changes), watch))
    });
    let shown = changes.flatten().map(|event| FileChange {
        change: change_kind(event.change),
        path: event.path,
    });
    Ok(respond(Framing::wanted(&headers), shown))
}

fn change_kind(change: guest::WatchChange) -> FileChangeKind {
    match change {
        guest::WatchChange::Created => FileChangeKind::Created,
        guest::WatchChange::Modified | guest::WatchChange::Unknown => FileChangeKind::Modified,
        guest::WatchChange::Written => FileChangeKind::Written,
        guest::WatchChange::Attributes => FileChangeKind::Attributes,
        guest::WatchChange::Removed => FileChangeKind::Removed,
        guest::WatchChange::MovedIn => FileChangeKind::MovedIn,
        guest::WatchChange::MovedOut => FileChangeKind::MovedOut,
        guest::WatchChange::Overflow => FileChangeKind::Overflow,
    }
}
