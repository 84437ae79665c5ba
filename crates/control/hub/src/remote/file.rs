//! A packed snapshot as one file behind a URL: fetched by `GET`, written by `PUT`, as to a presigned URL.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use forkd_oci::http;
use forkd_oci::registry::RegistryError;
use forkd_types::path_error;
use reqwest::blocking::{Body, Client, Response};
use reqwest::header::CONTENT_RANGE;
use reqwest::{StatusCode, Url};

use crate::error::HubError;
use crate::limits;

/// Bytes of a packed snapshot.
const MOST: u64 = limits::PACKS as u64 * limits::PACK + (1 << 30);
/// Times that the rest is asked for.
const RESUMES: u32 = 20;

struct Remote {
    url: Url,
    host: String,
    http: Client,
}

impl Remote {
    fn new(url: &str) -> Result<Self, HubError> {
        let wrong = || HubError::invalid("the address is not a URL of http or https");
        let url = Url::parse(url).map_err(|_| wrong())?;
        let host = super::host_of(&url).ok_or_else(wrong)?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(wrong());
        }
        let http = http::client(&url, &host, None)?;
        Ok(Self { url, host, http })
    }

    fn get(&self, from: u64) -> Result<Response, RegistryError> {
        http::patiently(|| {
            let url = self.url.clone();
            let answer = http::follow(url, &self.host, from, |url| self.http.get(url))?;
            http::judged(answer, &self.host, "file", false)
        })
    }
}

/// Fetches the file behind a URL. A connection that breaks is resumed. The content is checked when it is unpacked.
pub fn fetch(url: &str, file: &mut File) -> Result<(), HubError> {
    let remote = Remote::new(url)?;
    let mut at = 0;
    for _ in 0..RESUMES {
        let mut answer = remote.get(at)?;
        if at > 0 && !continues(&answer, at) {
            at = 0;
            file.set_len(0).map_err(HubError::Stream)?;
            file.seek(SeekFrom::Start(0)).map_err(HubError::Stream)?;
        }
        let end = answer.content_length().map(|length| at + length);
        let mut buffer = vec![0; 128 << 10];
        loop {
            match answer.read(&mut buffer) {
                Ok(0) if end.is_none_or(|end| at >= end) => return Ok(()),
                Ok(0) | Err(_) => break,
                Ok(read) => {
                    let bytes = buffer.get(..read).unwrap_or_default();
                    file.write_all(bytes).map_err(HubError::Stream)?;
                    at += read as u64;
                }
            }
            if at > MOST {
                return Err(HubError::invalid(format!(
                    "the file has more than {MOST} bytes"
                )));
            }
        }
    }
    Err(HubError::Stream(io::ErrorKind::UnexpectedEof.into()))
}

/// Writes a file to a URL in one request.
pub fn put(url: &str, path: &Path) -> Result<u64, HubError> {
    let remote = Remote::new(url)?;
    let size = std::fs::metadata(path)
        .map_err(path_error("read", path))?
        .len();
    let sent = http::patiently(|| {
        let file = File::open(path).map_err(|source| RegistryError::Content {
            what: path.display().to_string(),
            source,
        })?;
        let request = remote.http.put(remote.url.clone());
        let request = request
            .timeout(http::upload_time(size))
            .body(Body::sized(file, size));
        let answer = request
            .send()
            .map_err(|error| http::unreachable(&remote.host, error))?;
        http::judged(answer, &remote.host, "file", false)
    });
    sent.map(drop)?;
    Ok(size)
}

fn continues(answer: &Response, at: u64) -> bool {
    let range = answer.headers().get(CONTENT_RANGE);
    let range = range.and_then(|value| value.to_str().ok());
    answer.status() == StatusCode::PARTIAL_CONTENT
        && range.is_some_and(|range| range.starts_with(&format!("bytes {at}-")))
}
