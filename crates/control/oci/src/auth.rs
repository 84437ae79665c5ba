//! Credentials for registries, from the files that Docker and Podman write.
//!
//! A credential never stands in arguments, logs or errors: [`Secret`] prints as `…`.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use thiserror::Error;

const MAX_BYTES: u64 = 1 << 20;
/// The name that a helper returns with an identity token.
const TOKEN_USER: &str = "<token>";

/// Text that is never printed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// The text, for the request that needs it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// A right to read from a registry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Credential {
    Password {
        username: String,
        password: Secret,
    },
    /// Exchanged for a token at the registry's token service.
    Identity {
        token: Secret,
    },
    /// Sent as it is.
    Bearer {
        token: Secret,
    },
}

/// Why credentials cannot be read.
#[derive(Debug, Error)]
pub enum AuthError {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The parser's own message could quote the secret.
    #[error("{} is not a file of credentials: line {line} does not parse", path.display())]
    Syntax { path: PathBuf, line: usize },
    #[error("{} has a malformed entry for {host}", path.display())]
    Entry { path: PathBuf, host: String },
    #[error("the credential helper {helper} failed")]
    Helper {
        helper: String,
        #[source]
        source: std::io::Error,
    },
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct AuthFile {
    auths: BTreeMap<String, AuthEntry>,
    creds_store: Option<String>,
    cred_helpers: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct AuthEntry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
    registrytoken: Option<String>,
}

/// Whether programs that a file names are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Helpers {
    Run,
    Ignore,
}

/// The user's files, the first that exists counts: `$REGISTRY_AUTH_FILE`, Podman's, Docker's.
pub fn files_of_user() -> Vec<PathBuf> {
    let folder = |name: &str| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    let docker = folder("DOCKER_CONFIG")
        .or_else(|| folder("HOME").map(|home| home.join(".docker")))
        .map(|folder| folder.join("config.json"));
    [
        folder("REGISTRY_AUTH_FILE"),
        folder("XDG_RUNTIME_DIR").map(|folder| folder.join("containers/auth.json")),
        docker,
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The credential for a registry in the first of these files that has one. Files that do not exist are left out.
pub fn find(
    files: &[PathBuf],
    host: &str,
    repository: &str,
    helpers: Helpers,
) -> Result<Option<Credential>, AuthError> {
    for path in files {
        let Some(file) = read(path)? else {
            continue;
        };
        if let Some(found) = file.find(path, host, repository, helpers)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn read(path: &Path) -> Result<Option<AuthFile>, AuthError> {
    let failed = |source| AuthError::Read {
        path: path.to_owned(),
        source,
    };
    let mut bytes = Vec::new();
    match std::fs::File::open(path) {
        Ok(file) => file
            .take(MAX_BYTES)
            .read_to_end(&mut bytes)
            .map_err(failed)?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let parsed = serde_json::from_slice(&bytes).map_err(|error| AuthError::Syntax {
        path: path.to_owned(),
        line: error.line(),
    })?;
    Ok(Some(parsed))
}

impl AuthFile {
    fn find(
        &self,
        path: &Path,
        host: &str,
        repository: &str,
        helpers: Helpers,
    ) -> Result<Option<Credential>, AuthError> {
        // The entry for the longest part of the name counts.
        let mut wanted = format!("{host}/{repository}");
        loop {
            let entry = self.auths.iter().find(|(key, _)| plain_key(key) == wanted);
            if let Some((_, entry)) = entry
                && let Some(found) = entry.credential().map_err(|()| AuthError::Entry {
                    path: path.to_owned(),
                    host: host.to_owned(),
                })?
            {
                return Ok(Some(found));
            }
            match wanted.rfind('/') {
                Some(at) => wanted.truncate(at),
                None => break,
            }
        }
        let helper = self.cred_helpers.get(host).or(self.creds_store.as_ref());
        match helper {
            Some(helper) if helpers == Helpers::Run => ask_helper(helper, host),
            _ => Ok(None),
        }
    }
}

/// Docker writes some keys as URLs.
fn plain_key(key: &str) -> &str {
    let rest = key
        .strip_prefix("https://")
        .or_else(|| key.strip_prefix("http://"));
    match rest {
        Some(rest) => rest.split('/').next().unwrap_or(rest),
        None => key.trim_end_matches('/'),
    }
}

impl AuthEntry {
    fn credential(&self) -> Result<Option<Credential>, ()> {
        let some = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        if let Some(token) = some(&self.registrytoken) {
            let token = Secret(token);
            return Ok(Some(Credential::Bearer { token }));
        }
        if let Some(token) = some(&self.identitytoken) {
            let token = Secret(token);
            return Ok(Some(Credential::Identity { token }));
        }
        if let (Some(username), Some(password)) = (some(&self.username), some(&self.password)) {
            let password = Secret(password);
            return Ok(Some(Credential::Password { username, password }));
        }
        let Some(auth) = some(&self.auth) else {
            return Ok(None);
        };
        let text = STANDARD.decode(auth.trim()).map_err(drop)?;
        let text = String::from_utf8(text).map_err(drop)?;
        let (username, password) = text.split_once(':').ok_or(())?;
        Ok(Some(Credential::Password {
            username: username.to_owned(),
            password: Secret(password.trim_end_matches('\0').to_owned()),
        }))
    }
}

/// Runs `docker-credential-NAME get`.
fn ask_helper(name: &str, host: &str) -> Result<Option<Credential>, AuthError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Found {
        username: String,
        secret: String,
    }
    let helper = format!("docker-credential-{name}");
    let failed = |source| AuthError::Helper {
        helper: helper.clone(),
        source,
    };
    let simple = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    if !name.bytes().all(simple) {
        return Err(failed(std::io::Error::other("its name is malformed")));
    }
    let mut child = Command::new(&helper)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(host.as_bytes()).map_err(failed)?;
    }
    let output = child.wait_with_output().map_err(failed)?;
    // A helper that knows nothing of the registry fails, too: it is asked without a credential then.
    if !output.status.success() {
        return Ok(None);
    }
    let found: Found = serde_json::from_slice(&output.stdout)
        .map_err(|_| failed(std::io::Error::other("its answer does not parse")))?;
    let secret = Secret(found.secret);
    Ok(Some(if found.username == TOKEN_USER {
        Credential::Identity { token: secret }
    } else {
        Credential::Password {
            username: found.username,
            password: secret,
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str, host: &str, repository: &str) -> Result<Option<Credential>, AuthError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        std::fs::write(&path, text).unwrap();
        let files = [folder.path().join("missing"), path];
        find(&files, host, repository, Helpers::Ignore)
    }

    fn password(name: &str, word: &str) -> Credential {
        Credential::Password {
            username: name.into(),
            password: Secret(word.into()),
        }
    }

    #[test]
    fn every_kind_of_entry_is_read() {
        let text = r#"{"auths":{"a.example":{"auth":"dTpwOng="},"https://b.example/v1/":{"username":"u","password":"p"},
            "c.example":{"identitytoken":"t"},"d.example/team":{"auth":"dTpw"},"e.example":{}},"credsStore":"none"}"#;
        let get = |host, repository| found(text, host, repository).unwrap();
        assert_eq!(get("a.example", "x"), Some(password("u", "p:x")));
        assert_eq!(get("b.example", "x"), Some(password("u", "p")));
        assert!(matches!(
            get("c.example", "x"),
            Some(Credential::Identity { .. })
        ));
        assert_eq!(get("d.example", "team/x"), Some(password("u", "p")));
        assert_eq!(get("d.example", "other/x"), None);
        assert_eq!(get("e.example", "x"), None);
        assert_eq!(get("f.example", "x"), None);
    }

    #[test]
    fn nothing_prints_a_secret() {
        let shown = format!("{:?}", password("u", "hidden"));
        assert!(!shown.contains("hidden"), "{shown}");
        for text in [
            r#"{"auths":{"a":{"auth":"hidden!"}}}"#,
            r#"{"auths": "hidden"}"#,
        ] {
            let error = found(text, "a", "x").unwrap_err();
            let shown = format!("{error} {error:?}");
            assert!(!shown.contains("hidden"), "{shown}");
        }
    }
}
