//! Tokens and the owners of snapshots in the state database.
//!
//! Only the hash of a token is stored. From the first token on, clients need one, also after the last was deleted
//! ([`IssuedTokens`]).

use std::collections::HashMap;

use forkd_api::{Role, TokenInfo};
use forkd_types::Tag;
use rusqlite::{OptionalExtension, params};

use super::{Db, DbError, Survives};
use crate::owners::Ownership;

/// Set once the first token was made: from then on a token is asked for.
const REQUIRED: &str = "tokens_required";

/// The hash of a token. The token itself is not kept.
pub type TokenHash = [u8; 32];

/// Every token, and whether one is asked for.
#[derive(Debug)]
pub struct IssuedTokens {
    /// The tokens with what is shown of them, by name.
    pub tokens: Vec<(TokenInfo, TokenHash)>,
    /// A token was made at some time.
    pub required: bool,
}

fn read_tokens(c: &rusqlite::Connection) -> Result<IssuedTokens, DbError> {
    let mut statement =
        c.prepare_cached("SELECT name, owner, role, hash, created_at FROM tokens ORDER BY name")?;
    let rows = statement.query_map([], |row| {
        let role: String = row.get(2)?;
        let info = TokenInfo {
            name: row.get(0)?,
            owner: row.get(1)?,
            // A role that this version does not know allows the least.
            role: role.parse().unwrap_or(Role::Read),
            created_at_unix: row.get::<_, i64>(4)?.unsigned_abs(),
        };
        Ok((info, row.get::<_, TokenHash>(3)?))
    })?;
    let tokens = rows.collect::<Result<_, _>>()?;
    let required = c
        .query_row("SELECT 1 FROM meta WHERE key = ?1", [REQUIRED], |_| Ok(()))
        .optional()?
        .is_some();
    Ok(IssuedTokens { tokens, required })
}

impl Db {
    /// Every token, read before the daemon serves.
    pub fn tokens_at_start(&self) -> Result<IssuedTokens, DbError> {
        self.run_blocking(read_tokens)
    }

    pub async fn tokens(&self) -> Result<IssuedTokens, DbError> {
        self.run(read_tokens).await
    }

    /// Keeps a new token; `false` if the name is taken.
    pub async fn put_token(&self, info: TokenInfo, hash: TokenHash) -> Result<bool, DbError> {
        self.run(move |c| {
            let added = c.execute(
                "INSERT OR IGNORE INTO tokens (name, owner, role, hash, created_at)
                 VALUES (?1, ?2, ?3, ?4, ?5)",
                params![
                    info.name,
                    info.owner,
                    info.role.as_str(),
                    hash,
                    info.created_at_unix as i64
                ],
            )?;
            c.execute(
                "INSERT OR IGNORE INTO meta (key, value) VALUES (?1, '1')",
                [REQUIRED],
            )?;
            Ok(added > 0)
        })
        .await
    }

    /// Forgets a token; `false` if there is none of that name.
    pub async fn delete_token(&self, name: String) -> Result<bool, DbError> {
        self.run(move |c| Ok(c.execute("DELETE FROM tokens WHERE name = ?1", [&name])? > 0))
            .await
    }

    /// Who owns which snapshot, read before the daemon serves.
    pub fn snapshot_owners_at_start(&self) -> Result<HashMap<Tag, Ownership>, DbError> {
        self.run_blocking(|c| {
            let mut statement = c.prepare("SELECT tag, owner, public FROM snapshots")?;
            let rows = statement.query_map([], |row| {
                let ownership = Ownership {
                    owner: row.get(1)?,
                    public: row.get(2)?,
                };
                Ok((row.get::<_, String>(0)?, ownership))
            })?;
            let mut all = HashMap::new();
            for row in rows {
                let (tag, ownership) = row?;
                if let Ok(tag) = tag.parse() {
                    all.insert(tag, ownership);
                }
            }
            Ok(all)
        })
    }

    /// Keeps who owns a snapshot.
    pub async fn put_snapshot_owner(&self, tag: Tag, ownership: Ownership) -> Result<(), DbError> {
        self.run(move |c| {
            c.execute(
                "INSERT INTO snapshots (tag, owner, public) VALUES (?1, ?2, ?3)
                 ON CONFLICT (tag) DO UPDATE SET owner = ?2, public = ?3",
                params![tag.as_str(), ownership.owner, ownership.public],
            )?;
            Ok(())
        })
        .await
    }

    /// Forgets who owned a snapshot. A row that a failure leaves behind goes at the next start.
    pub fn delete_snapshot_owner_soon(&self, tag: Tag) {
        self.run_soon(Survives::ProcessDeath, move |c| {
            c.execute("DELETE FROM snapshots WHERE tag = ?1", [tag.as_str()])?;
            Ok(())
        });
    }

    /// Forgets who owned snapshots.
    pub async fn delete_snapshot_owners(&self, tags: Vec<Tag>) -> Result<(), DbError> {
        self.run(move |c| {
            for tag in &tags {
                c.execute("DELETE FROM snapshots WHERE tag = ?1", [tag.as_str()])?;
            }
            Ok(())
        })
        .await
    }
}
