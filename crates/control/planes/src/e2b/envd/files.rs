//! Downloads and uploads of files: `GET /files` and `POST /files`.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use flate2::write::GzDecoder;
use forkd_agent_client::{Client, Error as AgentError, FileWriter};
use forkd_edge::extract::Chunks;
use forkd_guest_proto as guest;
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::error::Error;
use serde::Serialize;

use super::filesystem::{METADATA, make_dirs};
use super::multipart::{Multipart, Piece};
use super::paths;
use super::users::User;
use crate::e2b::error::{Answer, Refusal};
use crate::e2b::state::E2b;
use crate::e2b::target::Reached;
use crate::e2b::text;
use crate::guest::files;

/// The most files of one upload.
const MAX_FILES: usize = 1000;
/// The beginning of the headers that name metadata.
const METADATA_HEADER: &str = "x-metadata-";
/// Compressed bytes that are inflated at once. They become at most a thousand times as many.
const INFLATED_AT_ONCE: usize = 4096;

/// A file that was written.
#[derive(Debug, Serialize)]
struct Written {
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    path: String,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
}

/// The error of a call about a file.
fn failed(error: Error) -> Refusal {
    use guest::ErrorCode as C;
    let status = match &error {
        Error::Agent {
            source: AgentError::Agent(refused),
            ..
        } => match refused.code {
            C::NotFound => StatusCode::NOT_FOUND,
            C::IsDirectory | C::NotDirectory | C::BadRequest | C::Exists => StatusCode::BAD_REQUEST,
            C::Permission => StatusCode::FORBIDDEN,
            C::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
            C::Limit | C::Busy => StatusCode::TOO_MANY_REQUESTS,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        },
        _ => return error.into(),
    };
    Refusal::new(status, error.chain())
}

/// The path and the user of a request.
struct Place {
    client: Client,
    user: User,
    /// The path of the query, if there is one.
    path: Option<String>,
    /// The metadata of all files of an upload.
    metadata: BTreeMap<String, String>,
}

/// The metadata that the headers name. Header names have no upper case.
fn metadata(headers: &HeaderMap) -> Answer<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    for (name, value) in headers {
        let Some(key) = name.as_str().strip_prefix(METADATA_HEADER) else {
            continue;
        };
        let value = value.to_str();
        let value = value.map_err(|_| Refusal::bad(format!("{name} is not printable text")))?;
        found.insert(key.to_owned(), value.to_owned());
    }
    Ok(found)
}

impl Place {
    async fn of(e2b: &E2b, reached: &Reached, query: &str) -> Answer<Self> {
        let query = text::query(query);
        let client = reached.sandbox.agent().await?;
        let name = text::value(&query, "username").filter(|name| !name.is_empty());
        let state = e2b.of(&reached.sandbox.id);
        let user = state
            .users
            .find(&client, name)
            .await
            .map_err(|error| Refusal::new(StatusCode::UNAUTHORIZED, error.to_string()))?;
        let path = text::value(&query, "path")
            .filter(|path| !path.is_empty())
            .map(|path| resolved(path, &user))
            .transpose()?;
        Ok(Self {
            client,
            user,
            path,
            metadata: BTreeMap::new(),
        })
    }
}

fn resolved(path: &str, user: &User) -> Answer<String> {
    paths::resolve(path, user).ok_or_else(|| Refusal::bad("the path is not valid"))
}

/// Sends a file.
pub async fn download(
    State(e2b): State<Arc<E2b>>,
    reached: Reached,
    request: Request,
) -> Answer<Response> {
    let place = Place::of(&e2b, &reached, request.uri().query().unwrap_or_default()).await?;
    let path = place
        .path
        .ok_or_else(|| Refusal::bad("the path is missing"))?;
    let found = files::stat(&place.client, &path, false)
        .await
        .map_err(failed)?;
    if found.kind == guest::FileKind::Directory {
        return Err(Refusal::bad(format!("path '{path}' is a directory")));
    }
    let mut reader = place
        .client
        .by(agent_limits::start())
        .read(guest::ReadRequest {
            path: path.clone(),
            ..guest::ReadRequest::default()
        })
        .await
        .map_err(|error| failed(Error::agent(format!("{path} cannot be read"))(error)))?;
    let size = reader.info().size;
    let regular = reader.info().kind == guest::FileKind::File;
    let first = reader
        .next()
        .await
        .map_err(|error| failed(Error::agent(format!("{path} cannot be read"))(error)))?;
    let mut response = match first {
        None => Body::empty().into_response(),
        Some(first) => {
            let rest = futures::stream::unfold(reader, |mut reader| async move {
                match reader.next().await {
                    Ok(None) => None,
                    Ok(Some(bytes)) => Some((Ok(Bytes::from(bytes)), reader)),
                    Err(error) => Some((Err(std::io::Error::other(error)), reader)),
                }
            });
            let first = futures::stream::iter([Ok(Bytes::from(first))]);
            Body::from_stream(futures::StreamExt::chain(first, rest)).into_response()
        }
    };
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static("application/octet-stream");
    headers.insert(header::CONTENT_TYPE, kind);
    // Files that the kernel makes up as they are read have no size.
    if regular && size > 0 {
        headers.insert(header::CONTENT_LENGTH, size.into());
    }
    Ok(response)
}

/// A body as it was before the client compressed it.
struct Content {
    chunks: Chunks,
    gunzip: Option<GzDecoder<Vec<u8>>>,
    /// Compressed bytes that are not inflated yet.
    waiting: Bytes,
}

impl Content {
    fn of(headers: &HeaderMap, body: Body) -> Answer<Self> {
        let encoding = headers
            .get(header::CONTENT_ENCODING)
            .map_or("identity", |value| value.to_str().unwrap_or("unknown"));
        let gunzip = match encoding {
            "identity" | "" => None,
            "gzip" => Some(GzDecoder::new(Vec::new())),
            _ => {
                return Err(Refusal::new(
                    StatusCode::UNSUPPORTED_MEDIA_TYPE,
                    "the content encoding is gzip or identity",
                ));
            }
        };
        Ok(Self {
            chunks: Chunks::of(body),
            gunzip,
            waiting: Bytes::new(),
        })
    }

    /// The next bytes; none at the end.
    async fn next(&mut self) -> Answer<Option<Bytes>> {
        let broken = |_| Refusal::bad("the body is not valid gzip");
        let Some(gunzip) = &mut self.gunzip else {
            return Ok(self.chunks.next().await?);
        };
        loop {
            if self.waiting.is_empty() {
                match self.chunks.next().await? {
                    Some(chunk) => self.waiting = chunk,
                    None => {
                        gunzip.try_finish().map_err(broken)?;
                        let rest = std::mem::take(gunzip.get_mut());
                        return Ok((!rest.is_empty()).then(|| rest.into()));
                    }
                }
            }
            let count = self.waiting.len().min(INFLATED_AT_ONCE);
            let part = self.waiting.split_to(count);
            gunzip.write_all(&part).map_err(broken)?;
            let inflated = std::mem::take(gunzip.get_mut());
            if !inflated.is_empty() {
                return Ok(Some(inflated.into()));
            }
        }
    }
}

/// A file of an upload.
struct Upload {
    writer: FileWriter,
    path: String,
    /// The file had metadata before.
    stale: bool,
}

/// Opens a file for the user, with the directories above it.
async fn open(place: &Place, path: String) -> Answer<Upload> {
    let wish = guest::StatRequest {
        path: path.clone(),
        no_follow: false,
        attributes: Some(METADATA.to_owned()),
    };
    let mut stale = false;
    if let Ok(found) = files::stat_with(&place.client, wish).await {
        if found.kind == guest::FileKind::Directory {
            return Err(Refusal::bad(format!("path is a directory: {path}")));
        }
        stale = !found.attributes.is_empty();
    } else {
        make_dirs(&place.client, paths::parent(&path), &place.user.name)
            .await
            .map_err(|error| Refusal::bad(error.message))?;
    }
    // In place, so that watchers see a write and not a rename.
    let writer = place
        .client
        .by(agent_limits::start())
        .write(guest::WriteRequest {
            path: path.clone(),
            owner: Some(place.user.name.clone()),
            ..guest::WriteRequest::default()
        })
        .map_err(|error| failed(not_written(&path)(error)))?;
    Ok(Upload {
        writer,
        path,
        stale,
    })
}

fn not_written(path: &str) -> impl FnOnce(AgentError) -> Error {
    Error::agent(format!("{path} cannot be written"))
}

impl Upload {
    async fn write(&mut self, bytes: &[u8]) -> Answer<()> {
        let written = self.writer.write(bytes).await;
        written.map_err(|error| failed(not_written(&self.path)(error)))
    }

    /// Ends the content and sets the metadata. Metadata of an earlier upload does not stay.
    async fn close(self, place: &Place) -> Answer<Written> {
        let path = self.path;
        self.writer
            .finish()
            .await
            .map_err(|error| failed(not_written(&path)(error)))?;
        if self.stale || !place.metadata.is_empty() {
            let wish = guest::SetAttrRequest {
                path: path.clone(),
                attributes: Some(guest::Attributes {
                    prefix: METADATA.to_owned(),
                    values: place.metadata.clone(),
                }),
                ..guest::SetAttrRequest::default()
            };
            let set = place.client.by(agent_limits::answer()).set_attr(wish).await;
            set.map_err(|error| {
                failed(Error::agent(format!("{path} cannot have metadata"))(error))
            })?;
        }
        Ok(Written {
            name: paths::name(&path),
            kind: "file",
            path,
            metadata: place.metadata.clone(),
        })
    }
}

/// Writes one file, or several of a form.
pub async fn upload(
    State(e2b): State<Arc<E2b>>,
    reached: Reached,
    request: Request,
) -> Answer<Response> {
    let (parts, body) = request.into_parts();
    let place = Place {
        metadata: metadata(&parts.headers)?,
        ..Place::of(&e2b, &reached, parts.uri.query().unwrap_or_default()).await?
    };
    let kind = parts
        .headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or("application/octet-stream");
    let content = Content::of(&parts.headers, body)?;
    let written = if kind.starts_with("multipart/form-data") {
        let reader = Multipart::new(kind).map_err(|error| Refusal::bad(error.to_string()))?;
        upload_form(&place, content, reader).await?
    } else {
        let path = place
            .path
            .clone()
            .ok_or_else(|| Refusal::bad("the path is missing"))?;
        vec![upload_one(&place, content, path).await?]
    };
    Ok((StatusCode::OK, Json(written)).into_response())
}

async fn upload_one(place: &Place, mut content: Content, path: String) -> Answer<Written> {
    let mut file = open(place, path).await?;
    while let Some(bytes) = content.next().await? {
        file.write(&bytes).await?;
    }
    file.close(place).await
}

async fn upload_form(
    place: &Place,
    mut content: Content,
    mut reader: Multipart,
) -> Answer<Vec<Written>> {
    let bad = |error: super::multipart::Malformed| Refusal::bad(error.to_string());
    let mut written = Vec::new();
    let mut open_file: Option<Upload> = None;
    while let Some(bytes) = content.next().await? {
        reader.push(&bytes);
        while let Some(piece) = reader.next_piece().map_err(bad)? {
            match piece {
                Piece::Begin { name, file } => {
                    // Other fields of the form mean nothing.
                    if name.as_deref().is_some_and(|name| name != "file") {
                        continue;
                    }
                    if written.len() >= MAX_FILES {
                        return Err(Refusal::bad(format!("at most {MAX_FILES} files at once")));
                    }
                    let path = match (&place.path, file) {
                        (Some(path), _) => path.clone(),
                        (None, Some(file)) => resolved(&file, &place.user)?,
                        (None, None) => return Err(Refusal::bad("a file has no path")),
                    };
                    open_file = Some(open(place, path).await?);
                }
                Piece::Data(bytes) => {
                    if let Some(file) = &mut open_file {
                        file.write(&bytes).await?;
                    }
                }
                Piece::End => {
                    if let Some(file) = open_file.take() {
                        written.push(file.close(place).await?);
                    }
                }
            }
        }
    }
    reader.finish().map_err(bad)?;
    Ok(written)
}
