//! Users of a guest, from its `/etc/passwd`.
//!
//! A request names a user or none. None is `user`, as in E2B's images; an image without that user has `root`.

use std::sync::Arc;

use axum::http::HeaderMap;
use base64::Engine;
use forkd_agent_client::Client;
use forkd_sandboxes::agent_limits;
use parking_lot::Mutex;

/// The user of requests that name none.
const DEFAULT: &str = "user";
/// The largest file that is read.
const MAX_FILE: usize = 1 << 20;
/// The longest name.
const MAX_NAME: usize = 64;

/// A user of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub home: String,
}

/// The users of a sandbox as they were last read.
#[derive(Debug, Default)]
pub struct Users(Mutex<Arc<Vec<User>>>);

/// The guest has no user of this name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid username: {name:?}")]
pub struct UnknownUser {
    pub name: String,
}

fn parse(text: &str) -> Vec<User> {
    text.lines()
        .filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next().filter(|name| !name.is_empty())?;
            let home = fields.nth(4)?;
            Some(User {
                name: name.to_owned(),
                home: if home.starts_with('/') { home } else { "/" }.to_owned(),
            })
        })
        .collect()
}

fn choose(users: &[User], wanted: Option<&str>) -> Option<User> {
    let named = |name: &str| users.iter().find(|user| user.name == name).cloned();
    match wanted {
        Some(name) => named(name),
        None => named(DEFAULT).or_else(|| named("root")),
    }
}

impl Users {
    fn known(&self) -> Arc<Vec<User>> {
        Arc::clone(&self.0.lock())
    }

    /// The user of a request. The file is read again if it did not have the user before.
    pub async fn find(&self, client: &Client, wanted: Option<&str>) -> Result<User, UnknownUser> {
        let shown: String = wanted.unwrap_or(DEFAULT).chars().take(MAX_NAME).collect();
        if let Some(found) = choose(&self.known(), wanted) {
            return Ok(found);
        }
        let calls = client.by(agent_limits::answer());
        let text = calls.read_file("/etc/passwd", MAX_FILE).await;
        let text = String::from_utf8_lossy(&text.unwrap_or_default()).into_owned();
        let mut users = parse(&text);
        if users.is_empty() {
            users.push(User {
                name: "root".into(),
                home: "/root".into(),
            });
        }
        let found = choose(&users, wanted);
        *self.0.lock() = Arc::new(users);
        found.ok_or(UnknownUser { name: shown })
    }
}

/// The user that a request names with `Authorization: Basic`.
pub fn named(headers: &HeaderMap) -> Option<String> {
    let header = headers.get("authorization")?.to_str().ok()?;
    let (scheme, given) = header.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let bytes = base64::engine::general_purpose::STANDARD
        .decode(given.trim())
        .ok()?;
    let text = String::from_utf8(bytes).ok()?;
    let name = text.split_once(':').map_or(text.as_str(), |(name, _)| name);
    Some(name.to_owned()).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_user_is_user_or_root() {
        let both = parse("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/bash\n");
        assert_eq!(choose(&both, None).unwrap().home, "/home/user");
        assert_eq!(choose(&both, Some("root")).unwrap().home, "/root");
        assert_eq!(choose(&both, Some("ghost")), None);
        let root = parse("root:x:0:0:root:/root:/bin/sh\nodd\n:x:1:1::/:\n");
        assert_eq!(choose(&root, None).unwrap().name, "root");
    }

    #[test]
    fn the_user_is_in_the_basic_header() {
        let mut headers = HeaderMap::new();
        assert_eq!(named(&headers), None);
        for (value, expected) in [
            ("Basic cm9vdDo=", Some("root")),
            ("basic cm9vdDpwdw==", Some("root")),
            ("Basic Og==", None),
            ("Bearer cm9vdDo=", None),
            ("Basic ???", None),
        ] {
            headers.insert("authorization", value.parse().unwrap());
            assert_eq!(named(&headers).as_deref(), expected, "{value}");
        }
    }
}
