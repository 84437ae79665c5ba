//! Files: checked paths and permissions.

use forkd_agent_client::Client;
use forkd_api::ErrorCode;
use forkd_guest_proto as guest;
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::error::Error;

/// The longest path.
pub const MAX_PATH: usize = 4096;
/// The most entries of one listing.
pub const MAX_ENTRIES: u64 = 10_000;

/// An absolute path.
pub fn checked(path: String) -> Result<String, Error> {
    if path.starts_with('/') && path.len() <= MAX_PATH && !path.contains('\0') {
        Ok(path)
    } else {
        Err(Error::refused(
            ErrorCode::InvalidRequest,
            format!("path must be an absolute path of at most {MAX_PATH} bytes"),
        ))
    }
}

/// Permission bits in octal.
pub fn mode(text: &str) -> Result<u32, Error> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o7777 && !text.starts_with('+'))
        .ok_or_else(|| Error::refused(ErrorCode::InvalidRequest, "mode is octal, such as 755"))
}

/// The attributes of a path; of a link itself if `no_follow`.
pub async fn stat(client: &Client, path: &str, no_follow: bool) -> Result<guest::FileInfo, Error> {
    stat_with(
        client,
        guest::StatRequest {
            path: path.to_owned(),
            no_follow,
            attributes: None,
        },
    )
    .await
}

/// The attributes of a path.
pub async fn stat_with(
    client: &Client,
    request: guest::StatRequest,
) -> Result<guest::FileInfo, Error> {
    let path = request.path.clone();
    client
        .by(agent_limits::answer())
        .stat_with(request)
        .await
        .map_err(Error::agent(format!("{path} cannot be read")))
}

/// The entries below a directory, up to `depth` levels, with the extended attributes of a prefix.
pub async fn list(
    client: &Client,
    path: &str,
    depth: u32,
    attributes: Option<&str>,
) -> Result<Vec<guest::Entry>, Error> {
    let (entries, _) = client
        .by(agent_limits::answer())
        .list(guest::ListRequest {
            path: path.to_owned(),
            depth,
            limit: Some(MAX_ENTRIES),
            attributes: attributes.map(str::to_owned),
        })
        .await
        .map_err(Error::agent(format!("{path} cannot be listed")))?;
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal() {
        assert_eq!(mode("755").unwrap(), 0o755);
        for bad in ["", "8", "77777", "+1", "-1", "0x1"] {
            assert!(mode(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn paths_are_absolute() {
        assert!(checked("/a".into()).is_ok());
        for bad in ["a", "", "/a\0b"] {
            assert!(checked(bad.into()).is_err());
        }
    }
}
