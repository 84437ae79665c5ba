//! Queries on sandboxes, workspaces and idempotency keys.
//!
//! A sandbox or workspace whose record cannot be read does not hide the others: [`Stored`] lists such rows apart.

use std::str::FromStr;

use forkd_types::{SandboxId, Tag};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, OptionalExtension, params};
use serde::de::DeserializeOwned;

use super::{Db, DbError, RECORD_VERSION, SandboxRecord, Survives, WorkspaceRecord};

/// The state of an idempotency key when a request claims it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claim {
    /// The key is new and now claimed: execute the request and settle the key.
    New,
    /// The same request has this response.
    Done(IdempotencyRecord),
    /// The same request is being executed, or was when the daemon died.
    Pending,
    /// The key was used for another request.
    Mismatch,
}

/// The response of an executed request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyRecord {
    pub status: u16,
    /// The response as JSON.
    pub body: String,
}

/// The records of a table.
#[derive(Debug)]
pub struct Stored<R, K> {
    /// Records that can be used.
    pub readable: Vec<R>,
    /// Rows that cannot be used. Each is one broken sandbox or workspace, and stays in the database until that is deleted.
    pub unreadable: Vec<Unreadable<K>>,
}

/// A row whose record cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable<K> {
    /// The key of the row.
    pub id: K,
    pub problem: String,
}

impl Db {
    /// Writes sandboxes down, all in one transaction. A power failure ends their VMs and may lose the rows, except those of
    /// sandboxes that write volumes: they name the layers that the volumes get.
    pub async fn put_sandboxes(&self, records: Vec<SandboxRecord>) -> Result<(), DbError> {
        let writes = |record: &SandboxRecord| record.written_volumes().next().is_some();
        let survives = match records.iter().any(writes) {
            true => Survives::PowerFailure,
            false => Survives::ProcessDeath,
        };
        self.run_as(survives, move |c| {
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

    /// Forgets sandboxes. After a power failure a row may be back: the sandbox is then shown as failed.
    pub async fn delete_sandboxes(&self, ids: Vec<SandboxId>) -> Result<(), DbError> {
        self.run_as(Survives::ProcessDeath, move |c| {
            for id in &ids {
                c.execute("DELETE FROM sandboxes WHERE id = ?1", [id.as_str()])?;
            }
            Ok(())
        })
        .await
    }

    pub async fn sandboxes(&self) -> Result<Stored<SandboxRecord, SandboxId>, DbError> {
        self.run(|c| read_all(c, "SELECT id, record FROM sandboxes ORDER BY id"))
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

    /// The workspace of a name. The error of a row that cannot be used is [`DbError::Unreadable`].
    pub async fn workspace(&self, name: Tag) -> Result<Option<WorkspaceRecord>, DbError> {
        self.run(move |c| {
            let row = c
                .query_row(
                    "SELECT record FROM workspaces WHERE name = ?1",
                    [name.as_str()],
                    |row| Ok(bytes(row.get_ref(0)?)),
                )
                .optional()?;
            row.map(|row| read(&row))
                .transpose()
                .map_err(|problem| DbError::Unreadable { name, problem })
        })
        .await
    }

    pub async fn workspaces(&self) -> Result<Stored<WorkspaceRecord, Tag>, DbError> {
        self.run(|c| read_all(c, "SELECT name, record FROM workspaces ORDER BY name"))
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

/// Reads rows of a key and a record.
fn read_all<R: DeserializeOwned, K: FromStr>(
    c: &Connection,
    sql: &str,
) -> Result<Stored<R, K>, DbError> {
    let mut statement = c.prepare_cached(sql)?;
    let rows = statement.query_map([], |row| {
        Ok((bytes(row.get_ref(0)?), bytes(row.get_ref(1)?)))
    })?;
    let mut stored = Stored {
        readable: Vec::new(),
        unreadable: Vec::new(),
    };
    for row in rows {
        let (key, record) = row?;
        let key = String::from_utf8_lossy(&key);
        match read(&record) {
            Ok(record) => stored.readable.push(record),
            Err(problem) => match key.parse() {
                Ok(id) => stored.unreadable.push(Unreadable { id, problem }),
                // No request can name such a row, so nothing but this line tells of it.
                Err(_) => tracing::error!(%key, problem, "a row of the state database is ignored"),
            },
        }
    }
    Ok(stored)
}

/// A value whatever its type: a damaged row may hold text that is not UTF-8, or no text.
fn bytes(value: ValueRef<'_>) -> Vec<u8> {
    match value {
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => bytes.to_vec(),
        ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) => Vec::new(),
    }
}

/// Reads a record of a version that this daemon knows.
fn read<R: DeserializeOwned>(record: &[u8]) -> Result<R, String> {
    #[derive(serde::Deserialize)]
    struct Version {
        version: Option<u32>,
    }
    let invalid = |error| format!("its stored record does not parse: {error}");
    let found: Version = serde_json::from_slice(record).map_err(invalid)?;
    if let Some(version) = found.version.filter(|version| *version > RECORD_VERSION) {
        return Err(format!(
            "its stored record has version {version}, this daemon reads up to {RECORD_VERSION}"
        ));
    }
    serde_json::from_slice(record).map_err(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_bad_row_is_one_bad_sandbox() {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::open(&dir.path().join("state.db")).unwrap();
        let good = SandboxRecord::unreadable("sb-1".parse().unwrap());
        let newer = SandboxRecord {
            version: RECORD_VERSION + 1,
            ..SandboxRecord::unreadable("sb-2".parse().unwrap())
        };
        db.put_sandboxes(vec![good.clone(), newer]).await.unwrap();
        db.run(|c| {
            c.execute_batch(
                "INSERT INTO sandboxes (id, state, record) VALUES ('sb-3', 'running', '{half');
                 INSERT INTO sandboxes (id, state, record) VALUES ('sb-4', 'running', CAST(x'ff' AS TEXT))",
            )?;
            Ok(())
        })
        .await
        .unwrap();
        let stored = db.sandboxes().await.unwrap();
        assert_eq!(stored.readable, [good]);
        let bad: Vec<_> = stored
            .unreadable
            .iter()
            .map(|bad| bad.id.as_str())
            .collect();
        assert_eq!(bad, ["sb-2", "sb-3", "sb-4"]);
        assert!(stored.unreadable[0].problem.contains("version 2"));
    }

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
