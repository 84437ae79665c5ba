//! Secrets in the state database. Values and the key of the certificate authority are sealed before they come here.

use forkd_types::SecretName;
use rusqlite::{OptionalExtension, params};

use super::{Db, DbError};

/// The row of the sealed certificate authority.
const AUTHORITY: &str = "secrets_authority";

/// A stored secret without its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredSecret {
    pub name: String,
    pub created_at_unix: u64,
    pub updated_at_unix: u64,
}

impl Db {
    /// The secrets of an owner, in the order of their names.
    pub async fn secrets(&self, owner: String) -> Result<Vec<StoredSecret>, DbError> {
        self.run(move |c| {
            let mut statement = c.prepare_cached(
                "SELECT name, created_at, updated_at FROM secrets WHERE owner = ?1 ORDER BY name",
            )?;
            let rows = statement.query_map([&owner], |row| {
                Ok(StoredSecret {
                    name: row.get(0)?,
                    created_at_unix: row.get::<_, i64>(1)?.unsigned_abs(),
                    updated_at_unix: row.get::<_, i64>(2)?.unsigned_abs(),
                })
            })?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
        .await
    }

    /// Stores or replaces a secret; `None` if the owner would have more than `most`.
    pub async fn put_secret(
        &self,
        owner: String,
        name: SecretName,
        sealed: Vec<u8>,
        now: u64,
        most: u32,
    ) -> Result<Option<StoredSecret>, DbError> {
        self.run(move |c| {
            let now = i64::try_from(now).unwrap_or(i64::MAX);
            let key = params![owner, name.as_str()];
            let find = "SELECT created_at FROM secrets WHERE owner = ?1 AND name = ?2";
            let created: Option<i64> = c.query_row(find, key, |row| row.get(0)).optional()?;
            let count = "SELECT count(*) FROM secrets WHERE owner = ?1";
            let count: u32 = c.query_row(count, [&owner], |row| row.get(0))?;
            if created.is_none() && count >= most {
                return Ok(None);
            }
            c.execute(
                "INSERT INTO secrets (owner, name, sealed, created_at, updated_at)
                 VALUES (?1, ?2, ?3, ?4, ?4)
                 ON CONFLICT (owner, name) DO UPDATE SET sealed = ?3, updated_at = ?4",
                params![owner, name.as_str(), sealed, now],
            )?;
            Ok(Some(StoredSecret {
                name: name.to_string(),
                created_at_unix: created.unwrap_or(now).unsigned_abs(),
                updated_at_unix: now.unsigned_abs(),
            }))
        })
        .await
    }

    /// The sealed value of a secret.
    pub async fn secret(
        &self,
        owner: String,
        name: SecretName,
    ) -> Result<Option<Vec<u8>>, DbError> {
        self.run(move |c| {
            let text = "SELECT sealed FROM secrets WHERE owner = ?1 AND name = ?2";
            let key = params![owner, name.as_str()];
            Ok(c.query_row(text, key, |row| row.get(0)).optional()?)
        })
        .await
    }

    /// Forgets a secret; `false` if there is none of that name.
    pub async fn delete_secret(&self, owner: String, name: SecretName) -> Result<bool, DbError> {
        self.run(move |c| {
            let text = "DELETE FROM secrets WHERE owner = ?1 AND name = ?2";
            Ok(c.execute(text, params![owner, name.as_str()])? > 0)
        })
        .await
    }

    /// The sealed certificate authority of the host.
    pub async fn secrets_authority(&self) -> Result<Option<Vec<u8>>, DbError> {
        self.run(|c| {
            let text = "SELECT value FROM meta WHERE key = ?1";
            let found: Option<String> = c
                .query_row(text, [AUTHORITY], |row| row.get(0))
                .optional()?;
            Ok(found.and_then(|text| hex::decode(text).ok()))
        })
        .await
    }

    pub async fn put_secrets_authority(&self, sealed: Vec<u8>) -> Result<(), DbError> {
        self.run(move |c| {
            let text = "INSERT INTO meta (key, value) VALUES (?1, ?2)
                        ON CONFLICT (key) DO UPDATE SET value = ?2";
            c.execute(text, params![AUTHORITY, hex::encode(sealed)])?;
            Ok(())
        })
        .await
    }
}
