//! Resources: things that a client reads by an address.
//!
//! | address | content |
//! |---|---|
//! | `forkd://snapshots` | the list of snapshots |
//! | `forkd://sandboxes` | the list of live sandboxes |
//! | `forkd://sandboxes/{id}` | one sandbox |
//! | `forkd://sandboxes/{id}/console` | its console output |
//! | `forkd://sandboxes/{id}/files/{path}` | a file in it |

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rmcp::ErrorData;
use rmcp::model::{ReadResourceResult, Resource, ResourceContents, ResourceTemplate};
use serde::Serialize;

use crate::call::Call;
use crate::refusal::Refusal;
use crate::tools::read_file;

const SCHEME: &str = "forkd://";
const JSON: &str = "application/json";
/// The most of a file or of the console that is read, in bytes.
const LIMIT: usize = 1 << 20;

/// The parsed address of a resource.
#[derive(Debug, PartialEq, Eq)]
enum Address<'a> {
    Snapshots,
    Sandboxes,
    Sandbox(&'a str),
    Console(&'a str),
    /// The sandbox and the absolute path of a file in it.
    File(&'a str, &'a str),
}

impl<'a> Address<'a> {
    fn parse(uri: &'a str) -> Option<Self> {
        let rest = uri.strip_prefix(SCHEME)?;
        match rest {
            "snapshots" => return Some(Self::Snapshots),
            "sandboxes" => return Some(Self::Sandboxes),
            _ => {}
        }
        let rest = rest.strip_prefix("sandboxes/")?;
        let (id, part) = match rest.split_once('/') {
            None => return (!rest.is_empty()).then_some(Self::Sandbox(rest)),
            Some(parts) => parts,
        };
        match part.strip_prefix("files/") {
            Some(path) if !path.is_empty() => {
                // The slash before the path may be left out.
                let absolute = if path.starts_with('/') {
                    path
                } else {
                    &part["files".len()..]
                };
                Some(Self::File(id, absolute))
            }
            _ => (part == "console").then_some(Self::Console(id)),
        }
    }
}

/// The resources that exist on every daemon.
pub fn fixed() -> Vec<Resource> {
    vec![
        Resource::new("forkd://snapshots", "snapshots")
            .with_title("Snapshots")
            .with_description("Frozen machines from which sandboxes are started")
            .with_mime_type(JSON),
        Resource::new("forkd://sandboxes", "sandboxes")
            .with_title("Sandboxes")
            .with_description("Live machines of this owner")
            .with_mime_type(JSON),
    ]
}

/// The forms of all other addresses.
pub fn templates() -> Vec<ResourceTemplate> {
    vec![
        ResourceTemplate::new("forkd://sandboxes/{id}", "sandbox")
            .with_description("One live machine")
            .with_mime_type(JSON),
        ResourceTemplate::new("forkd://sandboxes/{id}/console", "console")
            .with_description("Console output of a live machine")
            .with_mime_type("text/plain"),
        ResourceTemplate::new("forkd://sandboxes/{id}/files/{+path}", "file")
            .with_description("A file in a live machine, at most 1 MiB"),
    ]
}

/// The address is one of the forms.
pub fn is_template(uri: &str) -> bool {
    templates().iter().any(|form| form.uri_template == uri)
}

/// Reads a resource by its address.
pub async fn read(call: &Call<'_>, uri: &str) -> Result<ReadResourceResult, ErrorData> {
    let Some(address) = Address::parse(uri) else {
        let shown: String = uri.chars().take(200).collect();
        return Err(ErrorData::resource_not_found(
            format!("there is no resource {shown}"),
            Some(serde_json::json!({ "uri": shown })),
        ));
    };
    let content = match address {
        Address::Snapshots => json(uri, &call.client.snapshots().await.map_err(refused)?),
        Address::Sandboxes => json(uri, &call.client.sandboxes().await.map_err(refused)?),
        Address::Sandbox(id) => json(uri, &call.client.sandbox(id).await.map_err(refused)?),
        Address::Console(id) => {
            let tail = Some(LIMIT as u64);
            let bytes = call.client.logs(id, tail).await.map_err(refused)?;
            ResourceContents::text(String::from_utf8_lossy(&bytes), uri)
        }
        Address::File(id, path) => {
            let (bytes, more) = read_file(call, id, path, 0, LIMIT)
                .await
                .map_err(protocol_error)?;
            if more {
                return Err(ErrorData::invalid_params(
                    "the file has more than 1 MiB; use the tool read_file",
                    None,
                ));
            }
            match String::from_utf8(bytes) {
                Ok(text) => ResourceContents::text(text, uri),
                Err(error) => ResourceContents::blob(STANDARD.encode(error.as_bytes()), uri)
                    .with_mime_type("application/octet-stream"),
            }
        }
    };
    Ok(ReadResourceResult::new(vec![content]))
}

fn json(uri: &str, value: &impl Serialize) -> ResourceContents {
    let text = serde_json::to_string(value).unwrap_or_default();
    ResourceContents::text(text, uri).with_mime_type(JSON)
}

pub fn refused(error: forkd_rest_client::Error) -> ErrorData {
    protocol_error(error.into())
}

/// A refusal as an error of the protocol: reading a resource has no other way to fail.
fn protocol_error(refusal: Refusal) -> ErrorData {
    let data = serde_json::to_value(&refusal).ok();
    if refusal.code.ends_with("not_found") {
        ErrorData::resource_not_found(refusal.error, data)
    } else {
        ErrorData::internal_error(refusal.error, data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_or_refused() {
        let parse = Address::parse;
        assert_eq!(parse("forkd://snapshots"), Some(Address::Snapshots));
        assert_eq!(parse("forkd://sandboxes"), Some(Address::Sandboxes));
        assert_eq!(parse("forkd://sandboxes/a"), Some(Address::Sandbox("a")));
        assert_eq!(
            parse("forkd://sandboxes/a/console"),
            Some(Address::Console("a"))
        );
        for uri in [
            "forkd://sandboxes/a/files//etc/hosts",
            "forkd://sandboxes/a/files/etc/hosts",
        ] {
            assert_eq!(parse(uri), Some(Address::File("a", "/etc/hosts")));
        }
        for uri in [
            "",
            "forkd://",
            "http://snapshots",
            "forkd://sandboxes/",
            "forkd://sandboxes/a/",
            "forkd://sandboxes/a/files/",
            "forkd://sandboxes/a/exec",
        ] {
            assert_eq!(parse(uri), None, "{uri}");
        }
    }
}
