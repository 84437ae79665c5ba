//! State that survives a restart.
//!
//! One thread owns the database. Jobs that arrive while a commit is under way are carried out together in
//! the next one, so a burst of a hundred sandboxes costs a handful of commits; a job is answered only when
//! its commit is durable.

mod owners;
mod records;
mod schema;
mod tables;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};

use rusqlite::Connection;
use thiserror::Error;
use tokio::sync::oneshot;

pub use owners::{IssuedTokens, TokenHash};
pub use records::{
    BuiltRecord, CheckpointRecord, DiskStack, LayerRef, RECORD_VERSION, SandboxRecord, StoredState,
    WorkspaceRecord,
};
pub use tables::{Claim, IdempotencyRecord, Stored, Unreadable};

/// The most jobs in one commit.
const BATCH: usize = 512;

/// Why the database did not do what it was asked.
#[derive(Debug, Error)]
pub enum DbError {
    /// It cannot be opened.
    #[error("cannot open {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: rusqlite::Error,
    },
    /// It was written by a newer version.
    #[error(
        "{} has schema {found}, this program reads {known}: run the forkd that wrote it, or give another --data-dir",
        path.display()
    )]
    Schema {
        path: PathBuf,
        found: i64,
        /// The newest version known here.
        known: i64,
    },
    /// A statement failed.
    #[error("a statement failed")]
    Statement(#[from] rusqlite::Error),
    /// A stored record is invalid.
    #[error("a stored record does not parse")]
    Record(#[from] serde_json::Error),
    /// The commit failed.
    #[error("the commit failed: {reason}")]
    Commit {
        /// The message of SQLite.
        reason: String,
    },
    /// The thread is gone.
    #[error("the database is closed")]
    Closed,
}

type Answer = Box<dyn FnOnce(Result<(), String>) + Send>;
type Job = Box<dyn FnOnce(&Connection) -> (bool, Answer) + Send>;

/// The state database.
#[derive(Debug, Clone)]
pub struct Db {
    jobs: Sender<Job>,
}

impl Db {
    /// Opens the database and brings its schema up to date.
    pub fn open(path: &Path) -> Result<Self, DbError> {
        let connection = schema::open(path)?;
        let (jobs, queue) = channel();
        std::thread::Builder::new()
            .name("db".into())
            .spawn(move || serve(&connection, &queue))
            .map_err(|_| DbError::Closed)?;
        Ok(Self { jobs })
    }

    /// The same as [`Db::run`] for a thread that may wait: while the daemon opens.
    pub fn run_blocking<T, F>(&self, work: F) -> Result<T, DbError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, DbError> + Send + 'static,
    {
        let (sender, receiver) = channel();
        let job: Job = Box::new(move |connection| {
            let result = work(connection);
            let good = result.is_ok();
            let answer: Answer = Box::new(move |commit| {
                let _ = sender.send(outcome(result, commit));
            });
            (good, answer)
        });
        self.jobs.send(job).map_err(|_| DbError::Closed)?;
        receiver.recv().map_err(|_| DbError::Closed)?
    }

    /// Does something in a transaction and answers when it is durable.
    pub async fn run<T, F>(&self, work: F) -> Result<T, DbError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, DbError> + Send + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        let job: Job = Box::new(move |connection| {
            let result = work(connection);
            let good = result.is_ok();
            let answer: Answer = Box::new(move |commit| {
                // The caller may have stopped waiting.
                let _ = sender.send(outcome(result, commit));
            });
            (good, answer)
        });
        self.jobs.send(job).map_err(|_| DbError::Closed)?;
        receiver.await.map_err(|_| DbError::Closed)?
    }
}

fn outcome<T>(result: Result<T, DbError>, commit: Result<(), String>) -> Result<T, DbError> {
    match commit {
        Ok(()) => result,
        Err(reason) => result.and(Err(DbError::Commit { reason })),
    }
}

fn serve(connection: &Connection, queue: &Receiver<Job>) {
    while let Ok(first) = queue.recv() {
        let mut jobs = vec![first];
        jobs.extend(queue.try_iter().take(BATCH - 1));
        let begun = connection.execute_batch("BEGIN IMMEDIATE");
        let answers: Vec<Answer> = jobs.into_iter().map(|job| one(connection, job)).collect();
        let commit = begun
            .and_then(|()| connection.execute_batch("COMMIT"))
            .map_err(|error| error.to_string());
        if commit.is_err() {
            // Nothing to add when there was no transaction to begin with.
            let _ = connection.execute_batch("ROLLBACK");
        }
        for answer in answers {
            answer(commit.clone());
        }
    }
}

/// One job in a savepoint of its own: its failure is not that of the others.
fn one(connection: &Connection, job: Job) -> Answer {
    let saved = connection.execute_batch("SAVEPOINT job");
    let (good, answer) = job(connection);
    if saved.is_ok() {
        let end = if good {
            "RELEASE job"
        } else {
            "ROLLBACK TO job; RELEASE job"
        };
        if let Err(error) = connection.execute_batch(end) {
            tracing::error!(%error, "a savepoint did not end");
        }
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_failed_job_does_not_take_others_along() {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::open(&dir.path().join("state.db")).unwrap();
        let put = |key: &'static str, fail: bool| {
            db.run(move |c| {
                c.execute("INSERT INTO meta (key, value) VALUES (?1, 'v')", [key])?;
                if fail {
                    return Err(DbError::Closed);
                }
                Ok(())
            })
        };
        let (a, b, c) = tokio::join!(put("a", false), put("b", true), put("c", false));
        a.unwrap();
        assert!(b.is_err());
        c.unwrap();
        let count: i64 = db
            .run(|c| {
                Ok(c.query_row(
                    "SELECT count(*) FROM meta WHERE key IN ('a','b','c')",
                    [],
                    |r| r.get(0),
                )?)
            })
            .await
            .unwrap();
        assert_eq!(count, 2);
    }

    #[tokio::test]
    async fn what_is_committed_is_there_after_reopening() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.db");
        {
            let db = Db::open(&path).unwrap();
            db.run(|c| {
                c.execute("INSERT INTO meta (key, value) VALUES ('k', 'v')", [])?;
                Ok(())
            })
            .await
            .unwrap();
        }
        let db = Db::open(&path).unwrap();
        let value: String = db
            .run(|c| Ok(c.query_row("SELECT value FROM meta WHERE key = 'k'", [], |r| r.get(0))?))
            .await
            .unwrap();
        assert_eq!(value, "v");
    }

    #[test]
    fn a_newer_schema_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.db");
        drop(Db::open(&path).unwrap());
        let raw = Connection::open(&path).unwrap();
        raw.pragma_update(None, "user_version", 999).unwrap();
        drop(raw);
        assert!(matches!(
            Db::open(&path),
            Err(DbError::Schema { found: 999, .. })
        ));
    }
}
