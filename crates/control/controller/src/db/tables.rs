//! Reading and writing the tables.

use forkd_types::{SandboxId, Tag};
use rusqlite::{Connection, OptionalExtension, params};

use super::{Db, DbError, SandboxRecord, WorkspaceRecord};

use crate::clock;
use crate::error::Error;
use crate::http::idempotency::{Claim, Keys, Settled as IdempotencyRecord};

impl Keys for Db {
    type Error = Error;

    async fn claim(&self, actor: String, key: String, request: String) -> Result<Claim, Error> {
        Ok(self.claim_key(actor, key, request, clock::unix()).await?)
    }

    async fn settle(
        &self,
        actor: String,
        key: String,
        response: Option<IdempotencyRecord>,
    ) -> Result<(), Error> {
        Ok(self.settle_key(actor, key, response).await?)
    }
}

impl Db {
    /// Writes sandboxes down, all in one transaction.
    pub async fn put_sandboxes(&self, records: Vec<SandboxRecord>) -> Result<(), DbError> {
        self.run(move |c| {
            let mut statement = c.prepare_cached(
                "INSERT INTO sandboxes (id, state, record) VALUES (?1, ?2, ?3)
                 ON CONFLICT (id) DO UPDATE SET state = ?2, record = ?3",
            )?;
            for record in &records {
                let text = serde_json::to_string(record)?;
                statement.execute(params![record.id.as_str(), record.state.as_str(), text])?;
            }
            Ok(())
        })
        .await
    }

    /// Forgets sandboxes.
    pub async fn delete_sandboxes(&self, ids: Vec<SandboxId>) -> Result<(), DbError> {
        self.run(move |c| {
            for id in &ids {
                c.execute("DELETE FROM sandboxes WHERE id = ?1", [id.as_str()])?;
            }
            Ok(())
        })
        .await
    }

    /// Every sandbox.
    pub async fn sandboxes(&self) -> Result<Vec<SandboxRecord>, DbError> {
        self.run(|c| read_all(c, "SELECT record FROM sandboxes ORDER BY id"))
            .await
    }

    /// Writes a workspace down.
    pub async fn put_workspace(&self, record: WorkspaceRecord) -> Result<(), DbError> {
        self.run(move |c| {
            c.execute(
                "INSERT INTO workspaces (name, record) VALUES (?1, ?2)
                 ON CONFLICT (name) DO UPDATE SET record = ?2",
                params![record.name.as_str(), serde_json::to_string(&record)?],
            )?;
            Ok(())
        })
        .await
    }

    /// Forgets a workspace.
    pub async fn delete_workspace(&self, name: Tag) -> Result<(), DbError> {
        self.run(move |c| {
            c.execute("DELETE FROM workspaces WHERE name = ?1", [name.as_str()])?;
            Ok(())
        })
        .await
    }

    /// A workspace.
    pub async fn workspace(&self, name: Tag) -> Result<Option<WorkspaceRecord>, DbError> {
        self.run(move |c| {
            let text: Option<String> = c
                .query_row(
                    "SELECT record FROM workspaces WHERE name = ?1",
                    [name.as_str()],
                    |row| row.get(0),
                )
                .optional()?;
            Ok(text.map(|text| serde_json::from_str(&text)).transpose()?)
        })
        .await
    }

    /// Every workspace.
    pub async fn workspaces(&self) -> Result<Vec<WorkspaceRecord>, DbError> {
        self.run(|c| read_all(c, "SELECT record FROM workspaces ORDER BY name"))
            .await
    }

    /// Claims an idempotency key for a request.
    pub async fn claim_key(
        &self,
        actor: String,
        key: String,
        request: String,
        now: u64,
    ) -> Result<Claim, DbError> {
        self.run(move |c| {
            type Row = (String, Option<u16>, Option<String>);
            let found: Option<Row> = c
                .query_row(
                    "SELECT request, status, body FROM idempotency WHERE actor = ?1 AND key = ?2",
                    [&actor, &key],
                    |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
                )
                .optional()?;
            Ok(match found {
                None => {
                    c.execute(
                        "INSERT INTO idempotency (actor, key, request, created_at)
                         VALUES (?1, ?2, ?3, ?4)",
                        params![actor, key, request, now as i64],
                    )?;
                    Claim::New
                }
                Some((earlier, _, _)) if earlier != request => Claim::Mismatch,
                Some((_, Some(status), Some(body))) => {
                    Claim::Done(IdempotencyRecord { status, body })
                }
                Some(_) => Claim::Pending,
            })
        })
        .await
    }

    /// Says how the request of a key ended; `None` gives the key free again.
    pub async fn settle_key(
        &self,
        actor: String,
        key: String,
        answer: Option<IdempotencyRecord>,
    ) -> Result<(), DbError> {
        self.run(move |c| {
            match answer {
                Some(answer) => c.execute(
                    "UPDATE idempotency SET status = ?3, body = ?4 WHERE actor = ?1 AND key = ?2",
                    params![actor, key, answer.status, answer.body],
                )?,
                None => c.execute(
                    "DELETE FROM idempotency WHERE actor = ?1 AND key = ?2",
                    [&actor, &key],
                )?,
            };
            Ok(())
        })
        .await
    }

    /// Forgets keys that are older than this, and those whose request a dead daemon was carrying out.
    pub async fn expire_keys(&self, before: u64, pending_too: bool) -> Result<(), DbError> {
        self.run(move |c| {
            c.execute(
                "DELETE FROM idempotency WHERE created_at < ?1",
                [before as i64],
            )?;
            if pending_too {
                c.execute("DELETE FROM idempotency WHERE status IS NULL", [])?;
            }
            Ok(())
        })
        .await
    }
}

fn read_all<T: serde::de::DeserializeOwned>(c: &Connection, sql: &str) -> Result<Vec<T>, DbError> {
    let mut statement = c.prepare_cached(sql)?;
    let rows = statement.query_map([], |row| row.get::<_, String>(0))?;
    let mut all = Vec::new();
    for row in rows {
        all.push(serde_json::from_str(&row?)?);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_key_is_claimed_once() {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::open(&dir.path().join("state.db")).unwrap();
        let claim =
            |key: &str, request: &str| db.claim_key("me".into(), key.into(), request.into(), 100);
        assert_eq!(claim("k", "r").await.unwrap(), Claim::New);
        assert_eq!(claim("k", "r").await.unwrap(), Claim::Pending);
        assert_eq!(claim("k", "other").await.unwrap(), Claim::Mismatch);
        let answer = IdempotencyRecord {
            status: 201,
            body: "[]".into(),
        };
        db.settle_key("me".into(), "k".into(), Some(answer.clone()))
            .await
            .unwrap();
        assert_eq!(claim("k", "r").await.unwrap(), Claim::Done(answer));
        db.expire_keys(101, false).await.unwrap();
        assert_eq!(claim("k", "r").await.unwrap(), Claim::New);
        db.settle_key("me".into(), "k".into(), None).await.unwrap();
        assert_eq!(claim("k", "other").await.unwrap(), Claim::New);
    }
}
