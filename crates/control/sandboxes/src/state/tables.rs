//! Queries on sandboxes, workspaces and idempotency keys.
//!
//! A sandbox whose record cannot be read does not hide the others: [`Stored`] lists such rows apart.

use forkd_types::{SandboxId, Tag};
use rusqlite::{Connection, OptionalExtension, params};

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

/// The sandboxes of the database.
#[derive(Debug, Default)]
pub struct Stored {
    /// Records that can be used.
    pub readable: Vec<SandboxRecord>,
    /// Rows that cannot: each is one failed sandbox, and stays in the database until that is deleted.
    pub unreadable: Vec<Unreadable>,
}

/// A row whose record cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable {
    /// The key of the row.
    pub id: SandboxId,
    pub problem: String,
}

impl Db {
    /// Writes sandboxes down, all in one transaction. A power failure ends their VMs and may lose the rows.
    pub async fn put_sandboxes(&self, records: Vec<SandboxRecord>) -> Result<(), DbError> {
        self.run_as(Survives::ProcessDeath, move |c| {
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

    pub async fn sandboxes(&self) -> Result<Stored, DbError> {
        self.run(read_sandboxes).await
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

fn read_sandboxes(c: &Connection) -> Result<Stored, DbError> {
    let mut statement = c.prepare_cached("SELECT id, record FROM sandboxes ORDER BY id")?;
    let rows = statement.query_map([], |row| {
        Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?))
    })?;
    let mut stored = Stored::default();
    for row in rows {
        let (key, text) = row?;
        match read_sandbox(&text) {
            Ok(record) => stored.readable.push(record),
            Err(problem) => match key.parse() {
                Ok(id) => stored.unreadable.push(Unreadable { id, problem }),
                // No request can name such a row, so nothing but this line tells of it.
                Err(_) => tracing::error!(key, problem, "a row of the state database is ignored"),
            },
        }
    }
    Ok(stored)
}

fn read_sandbox(text: &str) -> Result<SandboxRecord, String> {
    #[derive(serde::Deserialize)]
    struct Version {
        version: Option<u32>,
    }
    let found: Version = serde_json::from_str(text)
        .map_err(|error| format!("its stored record does not parse: {error}"))?;
    if let Some(version) = found.version.filter(|version| *version > RECORD_VERSION) {
        return Err(format!(
            "its stored record has version {version}, this daemon reads up to {RECORD_VERSION}"
        ));
    }
    serde_json::from_str(text).map_err(|error| format!("its stored record does not parse: {error}"))
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
            c.execute(
                "INSERT INTO sandboxes (id, state, record) VALUES ('sb-3', 'running', '{half')",
                [],
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
        assert_eq!(bad, ["sb-2", "sb-3"]);
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
