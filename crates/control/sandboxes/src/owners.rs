//! Who owns which snapshot, and which snapshots are public.
//!
//! The store knows no owners: its manifests are content. Ownership is a table of the state database with a copy in memory,
//! written when a tag is claimed and removed when the snapshot is deleted or the claim ends without one. A snapshot without an entry (copied into the
//! store by hand) belongs to the administrators.

use std::collections::HashMap;

use forkd_types::Tag;
use parking_lot::{RwLock, RwLockWriteGuard};

use crate::state::{Db, DbError};

/// The owner of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ownership {
    /// Who may use, change and delete it.
    pub owner: String,
    /// Whether every owner may see it and start children from it.
    pub public: bool,
}

/// How far an actor gets with a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Access {
    /// It does not exist for the actor.
    None,
    /// The actor may see it and start children from it.
    Use,
    /// The actor may change and delete it.
    Own,
}

/// The owners of all snapshots.
#[derive(Debug)]
pub struct SnapshotOwners {
    db: Db,
    by_tag: RwLock<HashMap<Tag, Ownership>>,
}

impl SnapshotOwners {
    /// Reads the table.
    pub fn open(db: &Db) -> Result<Self, DbError> {
        Ok(Self {
            by_tag: RwLock::new(db.snapshot_owners_at_start()?),
            db: db.clone(),
        })
    }

    /// Who owns a snapshot.
    pub fn get(&self, tag: &Tag) -> Option<Ownership> {
        self.by_tag.read().get(tag).cloned()
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<Tag, Ownership>> {
        self.by_tag.write()
    }

    /// How far an actor gets with a snapshot, whether or not it exists.
    pub fn access(&self, owns: impl FnOnce(Option<&str>) -> bool, tag: &Tag) -> Access {
        let found = self.get(tag);
        if owns(found.as_ref().map(|found| found.owner.as_str())) {
            Access::Own
        } else if found.is_some_and(|found| found.public) {
            Access::Use
        } else {
            Access::None
        }
    }

    /// Sets the owner of a snapshot, durably.
    pub async fn set(&self, tag: &Tag, ownership: Ownership) -> Result<(), DbError> {
        self.db
            .put_snapshot_owner(tag.clone(), ownership.clone())
            .await?;
        self.write().insert(tag.clone(), ownership);
        Ok(())
    }

    /// Forgets the owners of deleted snapshots.
    pub async fn forget(&self, tags: Vec<Tag>) -> Result<(), DbError> {
        {
            let mut map = self.write();
            for tag in &tags {
                map.remove(tag);
            }
        }
        self.db.delete_snapshot_owners(tags).await
    }

    /// Forgets the owner of a snapshot without waiting for the database. An owner that is set later is kept.
    pub fn forget_soon(&self, tag: Tag) {
        self.write().remove(&tag);
        self.db.delete_snapshot_owner_soon(tag);
    }

    /// Forgets snapshots that do not exist any more: a crash can leave their entries behind.
    pub async fn keep_only(&self, exists: impl Fn(&Tag) -> bool) -> Result<(), DbError> {
        let gone: Vec<Tag> = {
            let map = self.by_tag.read();
            map.keys().filter(|tag| !exists(tag)).cloned().collect()
        };
        self.forget(gone).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn ownership_survives_a_restart_and_public_is_for_use_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.db");
        let tag: Tag = "t".parse().unwrap();
        let a = |owner: Option<&str>| owner == Some("a");
        let b = |owner: Option<&str>| owner == Some("b");
        {
            let owners = SnapshotOwners::open(&Db::open(&path).unwrap()).unwrap();
            assert_eq!(owners.access(a, &tag), Access::None);
            let mine = Ownership {
                owner: "a".into(),
                public: true,
            };
            owners.set(&tag, mine).await.unwrap();
        }
        let owners = SnapshotOwners::open(&Db::open(&path).unwrap()).unwrap();
        assert_eq!(owners.access(a, &tag), Access::Own);
        assert_eq!(owners.access(b, &tag), Access::Use);
        assert_eq!(owners.access(|_| true, &tag), Access::Own);
        owners.keep_only(|_| false).await.unwrap();
        assert_eq!(owners.access(b, &tag), Access::None);
        assert_eq!(owners.get(&tag), None);
    }
}
