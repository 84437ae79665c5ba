//! The tables of the state database and the migration of older files.
//!
//! `STEPS` holds one migration per schema version; `user_version` counts those that were applied. Each step commits
//! together with its number. A file of a newer version is refused.

use std::path::Path;

use rusqlite::Connection;

use super::DbError;

/// Each step brings the schema from its number to the next. Steps are only ever added.
const STEPS: &[&str] = &[
    "
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    CREATE TABLE sandboxes (
        id TEXT PRIMARY KEY,
        state TEXT NOT NULL,
        record TEXT NOT NULL
    ) STRICT;
    CREATE TABLE workspaces (name TEXT PRIMARY KEY, record TEXT NOT NULL) STRICT;
    CREATE TABLE idempotency (
        actor TEXT NOT NULL,
        key TEXT NOT NULL,
        request TEXT NOT NULL,
        status INTEGER,
        body TEXT,
        created_at INTEGER NOT NULL,
        PRIMARY KEY (actor, key)
    ) STRICT;
",
    "
    CREATE TABLE tokens (
        name TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        role TEXT NOT NULL,
        hash BLOB NOT NULL,
        created_at INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE snapshots (
        tag TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        public INTEGER NOT NULL
    ) STRICT;
",
    "
    CREATE TABLE secrets (
        owner TEXT NOT NULL,
        name TEXT NOT NULL,
        sealed BLOB NOT NULL,
        created_at INTEGER NOT NULL,
        updated_at INTEGER NOT NULL,
        PRIMARY KEY (owner, name)
    ) STRICT;
",
];

/// The log is copied into the database file at this length even if jobs wait. The thread that owns the database copies
/// it earlier, when there are none.
const LOG_PAGES: i64 = 4096;

/// Opens the file and brings its schema up to date.
pub fn open(path: &Path) -> Result<Connection, DbError> {
    let failed = |source| DbError::Open {
        path: path.to_owned(),
        source,
    };
    let connection = Connection::open(path).map_err(failed)?;
    connection
        .execute_batch(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;",
        )
        .and_then(|()| connection.pragma_update(None, "wal_autocheckpoint", LOG_PAGES))
        .map_err(failed)?;
    migrate(&connection, path)?;
    Ok(connection)
}

fn migrate(connection: &Connection, path: &Path) -> Result<(), DbError> {
    let known = STEPS.len() as i64;
    let found: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    if found > known || found < 0 {
        return Err(DbError::Schema {
            path: path.to_owned(),
            found,
            known,
        });
    }
    for (at, step) in STEPS
        .iter()
        .enumerate()
        .skip(usize::try_from(found).unwrap_or(0))
    {
        connection.execute_batch(&format!(
            "BEGIN IMMEDIATE; {step}; PRAGMA user_version = {}; COMMIT;",
            at + 1
        ))?;
    }
    Ok(())
}
