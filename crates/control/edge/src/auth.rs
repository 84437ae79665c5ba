//! Who makes a request, and what the request may do.
//!
//! An [`Actor`] has a name (for the log), an owner (what it makes belongs to) and a [`Role`]. Sources of actors:
//!
//! | source | role | owner |
//! |---|---|---|
//! | Unix socket, root or the daemon's user | admin | `uid:N` |
//! | token file | admin | name of the line, `token` for a bare one |
//! | token made through the API | as given | as given |
//! | no token at all exists, loopback or Unix socket | admin | `anonymous` |
//!
//! A token is asked for as soon as one exists, and stays asked for when the last one was revoked: a door never opens by
//! itself. Only digests of tokens are kept. Tokens have at least 128 bits of entropy or are the operator's own choice, so a
//! plain hash suffices; it is compared in constant time with every token.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use forkd_api::Role;
use parking_lot::{RwLock, RwLockReadGuard};
use subtle::ConstantTimeEq;

/// The shortest token of a token file.
const MIN_TOKEN: usize = 16;
/// Words that people leave in example files.
const PLACEHOLDERS: [&str; 2] = ["REPLACE_ME", "CHANGE_ME"];
/// Prefix of a line in the token file that holds a digest.
const HASHED: &str = "b3:";
/// Prefix of tokens that the daemon makes: secret scanners find them by it.
const PREFIX: &str = "forkd_";
/// The owner of everything that was made while the daemon had no tokens.
const ANONYMOUS: &str = "anonymous";
/// The name and owner of a bare line in the token file.
const BARE: &str = "token";

/// Who makes a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Actor {
    /// The name of the token or of the local user.
    pub name: String,
    /// Who owns what the request makes.
    pub owner: String,
    pub role: Role,
}

impl Actor {
    /// A client of a daemon without tokens.
    pub fn anonymous() -> Self {
        Self::admin(ANONYMOUS)
    }

    /// An administrator whose name and owner are the same.
    pub fn admin(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            owner: name.to_owned(),
            role: Role::Admin,
        }
    }

    /// Whether the actor may do everything.
    pub fn is_admin(&self) -> bool {
        self.role == Role::Admin
    }

    /// Whether something of this owner is the actor's to see and, within the role, to change. Things without an owner are
    /// the administrators'.
    pub fn owns(&self, owner: Option<&str>) -> bool {
        self.is_admin() || owner == Some(&self.owner)
    }
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denied {
    /// It carries no token.
    Missing,
    /// It carries an unknown token.
    Invalid,
}

pub use forkd_sandboxes::state::TokenHash;

/// The digest under which a token is kept.
pub fn hash(token: &str) -> TokenHash {
    *blake3::hash(token.as_bytes()).as_bytes()
}

/// A new token: 256 random bits.
pub fn new_token() -> String {
    format!("{PREFIX}{}", hex::encode(rand::random::<[u8; 32]>()))
}

/// Whether a text can name a token or an owner. Names that the daemon gives itself cannot be chosen, or their bearer would
/// own what was made before tokens existed.
pub fn is_free_name(text: &str) -> bool {
    is_name(text) && text != ANONYMOUS && text != BARE
}

/// A known token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// Whose requests carry it.
    pub actor: Actor,
    pub hash: TokenHash,
}

/// The known tokens.
pub struct Auth {
    file: Option<PathBuf>,
    tokens: RwLock<Tokens>,
}

#[derive(Default)]
struct Tokens {
    of_file: Vec<Token>,
    issued: Vec<Token>,
    required: bool,
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
        let of_file = file.map(read).transpose()?;
        Ok(Self {
            file: file.map(Path::to_owned),
            tokens: RwLock::new(Tokens {
                required: of_file.is_some(),
                of_file: of_file.unwrap_or_default(),
                issued: Vec::new(),
            }),
        })
    }

    /// Reads the file again; on an error the old tokens stay.
    pub fn reload(&self) -> anyhow::Result<()> {
        if let Some(file) = &self.file {
            let of_file = read(file)?;
            self.change(|tokens| tokens.of_file = of_file);
        }
        Ok(())
    }

    /// Sets the tokens that were made through the API; with `required` a token is asked for although none may be left.
    pub fn set_issued(&self, issued: Vec<Token>, required: bool) {
        self.change(|tokens| {
            tokens.required |= required || !issued.is_empty();
            tokens.issued = issued;
        });
    }

    fn change(&self, change: impl FnOnce(&mut Tokens)) {
        change(&mut self.tokens.write());
    }

    fn tokens(&self) -> RwLockReadGuard<'_, Tokens> {
        self.tokens.read()
    }

    /// Whether a token is asked for.
    pub fn is_required(&self) -> bool {
        self.tokens().required
    }

    /// Whether the token file names administrators.
    pub fn has_file(&self) -> bool {
        self.file.is_some()
    }

    /// Who sends this `Authorization` header.
    pub fn check(&self, header: Option<&str>) -> Result<Actor, Denied> {
        let tokens = self.tokens();
        if !tokens.required {
            return Ok(Actor::anonymous());
        }
        let given = header
            .and_then(|header| header.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
            .map(|(_, token)| token.trim())
            .ok_or(Denied::Missing)?;
        let hash = hash(given);
        // Every token is compared, so that the time does not depend on which one matches.
        let mut found = None;
        for token in tokens.of_file.iter().chain(&tokens.issued) {
            if bool::from(token.hash.ct_eq(&hash)) {
                found = Some(token);
            }
        }
        found
            .map(|token| token.actor.clone())
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
            _ => (BARE, line),
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
            hash(secret)
        }
    };
    Ok(Token {
        actor: Actor::admin(name),
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
    fn tokens_of_the_file_are_administrators_by_name_plain_and_hashed() {
        let digest = blake3::hash(b"another-long-secret").to_hex();
        let auth = auth(&format!(
            "# people\nalice=a-long-enough-secret\n\nbob=b3:{digest}\njust-a-token-on-a-line\n"
        ))
        .unwrap();
        let who = |header: &str| auth.check(Some(header));
        assert_eq!(
            who("Bearer a-long-enough-secret"),
            Ok(Actor::admin("alice"))
        );
        assert_eq!(who("bearer another-long-secret"), Ok(Actor::admin("bob")));
        assert_eq!(
            who("Bearer just-a-token-on-a-line"),
            Ok(Actor::admin("token"))
        );
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
    fn the_first_token_closes_the_door_and_the_last_revoked_one_does_not_open_it() {
        let auth = Auth::load(None).unwrap();
        assert_eq!(auth.check(None), Ok(Actor::anonymous()));
        assert!(!auth.is_required());
        let secret = new_token();
        let actor = Actor {
            name: "ci".into(),
            owner: "team".into(),
            role: Role::Use,
        };
        let token = Token {
            actor: actor.clone(),
            hash: hash(&secret),
        };
        auth.set_issued(vec![token], false);
        assert_eq!(auth.check(None), Err(Denied::Missing));
        assert_eq!(auth.check(Some(&format!("Bearer {secret}"))), Ok(actor));
        auth.set_issued(Vec::new(), false);
        assert_eq!(
            auth.check(Some(&format!("Bearer {secret}"))),
            Err(Denied::Invalid)
        );
        let restarted = Auth::load(None).unwrap();
        restarted.set_issued(Vec::new(), true);
        assert_eq!(restarted.check(None), Err(Denied::Missing));
    }

    #[test]
    fn an_owner_owns_its_own_and_an_administrator_everything() {
        let user = Actor {
            role: Role::Use,
            ..Actor::admin("a")
        };
        assert!(user.owns(Some("a")) && !user.owns(Some("b")) && !user.owns(None));
        assert!(Actor::admin("a").owns(Some("b")) && Actor::admin("a").owns(None));
        assert!(is_free_name("team-1") && !is_free_name("anonymous") && !is_free_name("uid:0"));
    }
}
