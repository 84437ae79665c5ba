//! Creating and revoking tokens.
//!
//! Changes are durable and effective before the request is answered. [`Tokens`] makes one change at a time, so that an
//! older list never replaces a newer one.

use std::sync::Arc;

use forkd_api::{CreateToken, CreatedToken, ErrorCode, Role, TokenInfo};

use crate::auth::{self, Actor, Auth, Token};
use forkd_sandboxes::clock;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::state::{Db, IssuedTokens};

/// The tokens that were made through the API.
#[derive(Debug)]
pub struct Tokens {
    db: Db,
    auth: Arc<Auth>,
    /// One change at a time, so that an older list never replaces a newer one at the border.
    changing: tokio::sync::Mutex<()>,
}

impl Tokens {
    /// Reads the table and lets the tokens in.
    pub fn open(db: &Db, auth: &Arc<Auth>) -> Result<Self, Error> {
        let found = db.tokens_at_start()?;
        auth.set_issued(known(&found), found.required);
        Ok(Self {
            db: db.clone(),
            auth: Arc::clone(auth),
            changing: tokio::sync::Mutex::default(),
        })
    }

    /// Every token, without its secret.
    pub async fn list(&self) -> Result<Vec<TokenInfo>, Error> {
        let found = self.db.tokens().await?;
        Ok(found.tokens.into_iter().map(|(info, _)| info).collect())
    }

    async fn refresh(&self) -> Result<(), Error> {
        let found = self.db.tokens().await?;
        self.auth.set_issued(known(&found), found.required);
        Ok(())
    }

    /// Makes a token. The secret is in the answer and nowhere else.
    pub async fn create(&self, request: CreateToken) -> Result<CreatedToken, Error> {
        let owner = request.owner.unwrap_or_else(|| request.name.clone());
        for name in [&request.name, &owner] {
            if !auth::is_free_name(name) {
                return Err(Error::hinted(
                    ErrorCode::InvalidName,
                    format!("{name:?} cannot name a token or an owner"),
                    "1 to 32 letters, digits, \"-\" and \"_\"; \"anonymous\" and \"token\" are taken",
                ));
            }
        }
        let _one = self.changing.lock().await;
        if !self.auth.is_required() && request.role != Role::Admin {
            return Err(Error::hinted(
                ErrorCode::InvalidRequest,
                "the first token must have the role admin: from then on every client needs a token",
                "forkd token create --role admin NAME",
            ));
        }
        let token = auth::new_token();
        let info = TokenInfo {
            name: request.name,
            owner,
            role: request.role,
            created_at_unix: clock::unix(),
        };
        if !self.db.put_token(info.clone(), auth::hash(&token)).await? {
            return Err(Error::refused(
                ErrorCode::AlreadyExists,
                format!("there is already a token {}", info.name),
            ));
        }
        self.refresh().await?;
        Ok(CreatedToken {
            name: info.name,
            owner: info.owner,
            role: info.role,
            created_at_unix: info.created_at_unix,
            token,
        })
    }

    /// Revokes a token. The next request with it is refused; requests in flight go on.
    pub async fn revoke(&self, name: &str) -> Result<(), Error> {
        let _one = self.changing.lock().await;
        let found = self.db.tokens().await?;
        if !self.auth.has_file() && is_last_admin(&found, name) {
            return Err(Error::hinted(
                ErrorCode::WrongState,
                format!("{name} is the last token of an administrator"),
                "make another one first, or start the daemon with --token-file",
            ));
        }
        if !self.db.delete_token(name.to_owned()).await? {
            let shown: String = name.chars().take(40).collect();
            return Err(Error::hinted(
                ErrorCode::TokenNotFound,
                format!("there is no token {shown}"),
                "GET /v1/tokens (forkd token ls) lists what there is",
            ));
        }
        self.refresh().await
    }
}

/// Stored tokens as requests are compared with them.
fn known(found: &IssuedTokens) -> Vec<Token> {
    let tokens = found.tokens.iter().map(|(info, hash)| Token {
        actor: Actor {
            name: info.name.clone(),
            owner: info.owner.clone(),
            role: info.role,
        },
        hash: *hash,
    });
    tokens.collect()
}

/// The token is the only one of an administrator.
fn is_last_admin(found: &IssuedTokens, name: &str) -> bool {
    let mut admins = found
        .tokens
        .iter()
        .filter(|(info, _)| info.role == Role::Admin);
    admins.all(|(info, _)| info.name == name)
        && found
            .tokens
            .iter()
            .any(|(info, _)| info.name == name && info.role == Role::Admin)
}
