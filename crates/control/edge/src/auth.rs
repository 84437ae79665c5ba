//! Who may use the daemon.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

use anyhow::{Context, bail};
use subtle::ConstantTimeEq;

/// The shortest token that is accepted.
const MIN_TOKEN: usize = 16;
/// What people leave in example files.
const PLACEHOLDERS: [&str; 2] = ["REPLACE_ME", "CHANGE_ME"];
/// A token that is written as its digest begins so.
const HASHED: &str = "b3:";

/// Who makes a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Actor(pub String);

impl Actor {
    /// Somebody on this host, when no token is asked for.
    pub fn anonymous() -> Self {
        Self("anonymous".to_owned())
    }
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a request is not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denied {
    /// It carries no token.
    Missing,
    /// It carries one that is not known.
    Invalid,
}

struct Token {
    name: String,
    hash: [u8; 32],
}

/// The tokens that are let in. Only their digests are kept.
pub struct Auth {
    file: Option<PathBuf>,
    tokens: RwLock<Option<Vec<Token>>>,
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Auth")
            .field("file", &self.file)
            .finish_non_exhaustive()
    }
}

impl Auth {
    /// Reads the file: one token a line, or `name=token`, or `name=b3:<digest>`; `#` begins a comment.
    pub fn load(file: Option<&Path>) -> anyhow::Result<Self> {
        let tokens = file.map(read).transpose()?;
        Ok(Self {
            file: file.map(Path::to_owned),
            tokens: RwLock::new(tokens),
        })
    }

    /// Reads the file again; on an error the old tokens stay.
    pub fn reload(&self) -> anyhow::Result<()> {
        if let Some(file) = &self.file {
            let tokens = read(file)?;
            *self.tokens.write().unwrap_or_else(PoisonError::into_inner) = Some(tokens);
        }
        Ok(())
    }

    /// A token is asked for.
    pub fn is_required(&self) -> bool {
        self.tokens
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }

    /// Who sends this `Authorization` header.
    pub fn check(&self, header: Option<&str>) -> Result<Actor, Denied> {
        let tokens = self.tokens.read().unwrap_or_else(PoisonError::into_inner);
        let Some(tokens) = tokens.as_ref() else {
            return Ok(Actor::anonymous());
        };
        let given = header
            .and_then(|header| header.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
            .map(|(_, token)| token.trim())
            .ok_or(Denied::Missing)?;
        let hash = blake3::hash(given.as_bytes());
        // Every token is compared, so that the time says nothing about which one came close.
        let mut found = None;
        for token in tokens {
            if bool::from(token.hash.ct_eq(hash.as_bytes())) {
                found = Some(token);
            }
        }
        found
            .map(|token| Actor(token.name.clone()))
            .ok_or(Denied::Invalid)
    }
}

fn read(file: &Path) -> anyhow::Result<Vec<Token>> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("cannot read the token file {}", file.display()))?;
    let mut tokens = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (name, secret) = match line.split_once('=') {
            Some((name, secret)) if is_name(name.trim()) => (name.trim(), secret.trim()),
            _ => ("token", line),
        };
        let token = parse(name, secret)
            .with_context(|| format!("{}, line {}", file.display(), number + 1))?;
        tokens.push(token);
    }
    if tokens.is_empty() {
        bail!("the token file {} holds no token", file.display());
    }
    Ok(tokens)
}

fn is_name(text: &str) -> bool {
    (1..=32).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
}

fn parse(name: &str, secret: &str) -> anyhow::Result<Token> {
    let hash = match secret.strip_prefix(HASHED) {
        Some(digits) if digits.len() == 64 => {
            let bytes = hex::decode(digits).context("the digest is not hexadecimal")?;
            bytes
                .try_into()
                .map_err(|_| anyhow::anyhow!("the digest has a wrong length"))?
        }
        _ => {
            if PLACEHOLDERS.iter().any(|word| secret.starts_with(word)) {
                bail!(
                    "the token of {name:?} is a placeholder: write `openssl rand -hex 32` or the like there"
                );
            }
            if secret.len() < MIN_TOKEN {
                bail!(
                    "the token of {name:?} has {} bytes, {MIN_TOKEN} is the least",
                    secret.len()
                );
            }
            *blake3::hash(secret.as_bytes()).as_bytes()
        }
    };
    Ok(Token {
        name: name.to_owned(),
        hash,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auth(text: &str) -> anyhow::Result<Auth> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, text).unwrap();
        Auth::load(Some(&path))
    }

    #[test]
    fn tokens_by_name_plain_and_hashed() {
        let digest = blake3::hash(b"another-long-secret").to_hex();
        let auth = auth(&format!(
            "# people\nalice=a-long-enough-secret\n\nbob=b3:{digest}\njust-a-token-on-a-line\n"
        ))
        .unwrap();
        let who = |header: &str| auth.check(Some(header)).map(|actor| actor.0);
        assert_eq!(who("Bearer a-long-enough-secret"), Ok("alice".into()));
        assert_eq!(who("bearer another-long-secret"), Ok("bob".into()));
        assert_eq!(who("Bearer just-a-token-on-a-line"), Ok("token".into()));
        assert_eq!(who("Bearer a-long-enough-secreT"), Err(Denied::Invalid));
        assert_eq!(who("Basic abc"), Err(Denied::Missing));
        assert_eq!(auth.check(None), Err(Denied::Missing));
    }

    #[test]
    fn weak_tokens_are_refused() {
        for text in [
            "",
            "# nothing\n",
            "short\n",
            "REPLACE_ME_with_a_token\n",
            "x=CHANGE_ME_please_do_it\n",
        ] {
            assert!(auth(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn without_a_file_everybody_is_let_in() {
        let auth = Auth::load(None).unwrap();
        assert_eq!(auth.check(None), Ok(Actor::anonymous()));
        assert!(!auth.is_required());
    }
}
