//! State that survives a restart.
//!
//! One thread owns the database. Jobs that arrive while a commit is under way are carried out together in
//! the next one, so a burst of a hundred sandboxes costs a handful of commits. A job is answered only after its commit.
//!
//! [`Survives`] names the failure that a commit survives. A commit that has to survive a power failure is synced, and
//! the sync covers every commit before it, because all of them are in one write-ahead log. The log is copied into the
//! database file while no job waits.

mod network;
mod owners;
mod ports;
mod records;
mod schema;
mod secrets;
mod tables;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use rusqlite::Connection;
use thiserror::Error;
use tokio::sync::oneshot;

pub use network::{InjectRecord, LimitsRecord, NetworkRecord};
pub use owners::{IssuedTokens, TokenHash};
pub use ports::{Access, PortRecord, PortsRecord};
pub use records::{
    BuiltRecord, CheckpointRecord, DiskStack, LayerRef, OnExpiry, RECORD_VERSION, SandboxRecord,
    StoredState, SuspendedSandbox, WorkspaceRecord,
};
pub use secrets::StoredSecret;
pub use tables::{Claim, IdempotencyRecord, Stored, Unreadable};

/// The most jobs in one commit.
const BATCH: usize = 512;
/// The log is copied into the database file when no job came for this long.
const IDLE: Duration = Duration::from_millis(500);

/// The failure that a commit survives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Survives {
    /// The end of the daemon, however sudden. For rows that describe a running VM: no VM survives a power failure.
    ProcessDeath,
    /// A power failure.
    PowerFailure,
}

impl Survives {
    /// The setting of SQLite. `NORMAL` does not sync a commit, but it syncs around each copy of the log, so a power
    /// failure cannot damage older rows. `OFF` would not.
    const fn pragma(self) -> &'static str {
        match self {
            Self::ProcessDeath => "PRAGMA synchronous = NORMAL",
            Self::PowerFailure => "PRAGMA synchronous = FULL",
        }
    }
}

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
type Work = Box<dyn FnOnce(&Connection) -> (bool, Answer) + Send>;

struct Job {
    survives: Survives,
    work: Work,
}

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
        let work: Work = Box::new(move |connection| {
            let result = work(connection);
            let good = result.is_ok();
            let answer: Answer = Box::new(move |commit| {
                let _ = sender.send(outcome(result, commit));
            });
            (good, answer)
        });
        let survives = Survives::PowerFailure;
        self.jobs
            .send(Job { survives, work })
            .map_err(|_| DbError::Closed)?;
        receiver.recv().map_err(|_| DbError::Closed)?
    }

    /// Does something in a transaction and answers when the commit survives a power failure.
    pub async fn run<T, F>(&self, work: F) -> Result<T, DbError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, DbError> + Send + 'static,
    {
        self.run_as(Survives::PowerFailure, work).await
    }

    /// Does something in a transaction and answers when the commit survives the failure named.
    pub async fn run_as<T, F>(&self, survives: Survives, work: F) -> Result<T, DbError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, DbError> + Send + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        let work: Work = Box::new(move |connection| {
            let result = work(connection);
            let good = result.is_ok();
            let answer: Answer = Box::new(move |commit| {
                // The caller may have stopped waiting.
                let _ = sender.send(outcome(result, commit));
            });
            (good, answer)
        });
        self.jobs
            .send(Job { survives, work })
            .map_err(|_| DbError::Closed)?;
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
    let mut log_grew = false;
    loop {
        let first = if log_grew {
            match queue.recv_timeout(IDLE) {
                Ok(job) => job,
                Err(RecvTimeoutError::Timeout) => {
                    copy_log(connection);
                    log_grew = false;
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        } else {
            match queue.recv() {
                Ok(job) => job,
                Err(_) => return,
            }
        };
        let mut jobs = vec![first];
        jobs.extend(queue.try_iter().take(BATCH - 1));
        carry_out(connection, jobs);
        log_grew = true;
    }
}

/// Carries out the jobs of one commit. The commit survives what the most demanding job asks for.
fn carry_out(connection: &Connection, jobs: Vec<Job>) {
    let survives = jobs.iter().map(|job| job.survives).max();
    let survives = survives.unwrap_or(Survives::PowerFailure);
    // Ignored inside a transaction, so it comes before the begin.
    let begun = connection
        .execute_batch(survives.pragma())
        .and_then(|()| connection.execute_batch("BEGIN IMMEDIATE"));
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

/// Copies the log into the database file, which syncs both, while no job waits for it.
fn copy_log(connection: &Connection) {
    let copied = connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
    if let Err(error) = copied {
        tracing::warn!(%error, "the log of the state database was not copied");
    }
}

/// One job in a savepoint of its own: its failure is not that of the others.
fn one(connection: &Connection, job: Job) -> Answer {
    let saved = connection.execute_batch("SAVEPOINT job");
    let (good, answer) = (job.work)(connection);
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

    #[tokio::test]
    async fn the_most_demanding_job_of_a_commit_decides_what_it_survives() {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::open(&dir.path().join("state.db")).unwrap();
        let level =
            |c: &Connection| Ok(c.query_row("PRAGMA synchronous", [], |row| row.get::<_, i64>(0))?);
        let (normal, full) = (1, 2);
        let sandbox = db.run_as(Survives::ProcessDeath, level).await.unwrap();
        assert_eq!(sandbox, normal);
        assert_eq!(db.run(level).await.unwrap(), full);
        // The first job keeps the thread busy until the others have arrived, so they share one commit.
        let (go, wait) = channel::<()>();
        let busy = db.run_as(Survives::ProcessDeath, move |_| {
            let _ = wait.recv();
            Ok(())
        });
        // Polled in this order: each queues its job before the last lets the first go on.
        let (busy, weak, strong, ()) = tokio::join!(
            biased;
            busy,
            db.run_as(Survives::ProcessDeath, level),
            db.run(level),
            async { go.send(()).unwrap() }
        );
        busy.unwrap();
        assert_eq!(strong.unwrap(), full);
        // In the commit of the first job if the thread had not begun it yet.
        assert!([normal, full].contains(&weak.unwrap()));
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
