//! Routes that read, write, list, remove and watch files in a sandbox.
//!
//! Content is streamed in both directions. A write replaces the file as a whole or not at all.

use axum::Json;
use axum::body::{Body as RawBody, Bytes};
use axum::http::HeaderMap;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use forkd_api::{
    ErrorCode, FileChange, FileChangeKind, FileEntry, FileKind, MakeDirRequest, WriteResult,
};
use forkd_guest_proto as guest;
use futures::StreamExt;
use serde::Deserialize;
use utoipa::IntoParams;

use super::owned::OwnedSandbox;
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::extract::{Body, Chunks, Params};
use forkd_edge::stream::{Framing, respond};
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::error::Error;

/// The longest path.
const MAX_PATH: usize = 4096;
/// The most entries of one listing.
const MAX_ENTRIES: u64 = 10_000;

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

fn checked(path: String) -> Result<String, Failure> {
    if path.starts_with('/') && path.len() <= MAX_PATH && !path.contains('\0') {
        Ok(path)
    } else {
        Err(Failure::new(
            ErrorCode::InvalidRequest,
            format!("path must be an absolute path of at most {MAX_PATH} bytes"),
        ))
    }
}

/// Reads a file.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files", tag = "guest",
    params(("id" = String, Path, description = "The sandbox"), FileParams), responses(
    (status = 200, description = "Its content", body = String, content_type = "application/octet-stream")
))]
pub async fn read(
    OwnedSandbox(sandbox): OwnedSandbox,
    Params(params): Params<FileParams>,
) -> Answer<Response> {
    let path = checked(params.path)?;
    let client = sandbox.agent().await?;
    let reader = client
        .by(agent_limits::start())
        .read(guest::ReadRequest {
            path: path.clone(),
            ..guest::ReadRequest::default()
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
    let mode = params
        .mode
        .map(|text| {
            u32::from_str_radix(&text, 8)
                .ok()
                .filter(|mode| *mode <= 0o7777)
        })
        .map(|mode| {
            mode.ok_or_else(|| {
                Failure::new(ErrorCode::InvalidRequest, "mode is octal, such as 755")
            })
        })
        .transpose()?;
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
    let (entries, _) = client
        .by(agent_limits::answer())
        .list(guest::ListRequest {
            path: path.clone(),
            depth: 1,
            limit: Some(MAX_ENTRIES),
        })
        .await
        .map_err(Error::agent(format!("{path} cannot be listed")))?;
    let mut shown: Vec<FileEntry> = entries
        .into_iter()
        .map(|entry| FileEntry {
            name: entry.path,
            kind: match entry.info.kind {
                guest::FileKind::File => FileKind::File,
                guest::FileKind::Directory => FileKind::Dir,
                guest::FileKind::Symlink => FileKind::Symlink,
                guest::FileKind::Other => FileKind::Other,
            },
            size: entry.info.size,
            mode: entry.info.mode,
            modified_unix: entry.info.modified_unix_ms / 1000,
        })
        .collect();
    shown.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Json(shown))
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
