//! Records of volumes in the state database.
//!
//! A row survives a power failure: the content that it names was synced before the row was written.

use forkd_store::BlobRef;
use forkd_types::{Digest, SandboxId, Tag};
use rusqlite::params;
use serde::{Deserialize, Serialize};

use super::{Db, DbError};

/// The version of stored volumes. A volume of a later version is not read.
pub const VOLUME_VERSION: u32 = 1;

/// A volume as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    pub version: u32,
    /// Tells the volume from an earlier one of the same name.
    pub id: u64,
    pub name: Tag,
    pub owner: String,
    pub created_at_unix: u64,
    /// Size of the disk.
    pub bytes: u64,
    /// The image at the bottom.
    pub base: BlobRef,
    /// Thin layers over it, the oldest first.
    pub layers: Vec<BlobRef>,
    /// Counts the changes of the content.
    pub generation: u64,
    /// The file system was unmounted or held when it was written last. Otherwise its journal has to be replayed, which
    /// a mount for writing does.
    pub clean: bool,
    /// The sandbox that writes it.
    pub writer: Option<SandboxId>,
}

impl VolumeRecord {
    /// Every blob that the volume consists of.
    pub fn blobs(&self) -> impl Iterator<Item = Digest> {
        let layers = self.layers.iter().map(|layer| layer.digest);
        layers.chain([self.base.digest])
    }
}

impl Db {
    /// Writes a volume down. It survives a power failure.
    pub async fn put_volume(&self, record: VolumeRecord) -> Result<(), DbError> {
        self.run(move |c| {
            c.execute(
                "INSERT INTO volumes (name, record) VALUES (?1, ?2)
                 ON CONFLICT (name) DO UPDATE SET record = ?2",
                params![record.name.as_str(), serde_json::to_string(&record)?],
            )?;
            Ok(())
        })
        .await
    }

    pub async fn delete_volume(&self, name: Tag) -> Result<(), DbError> {
        self.run(move |c| {
            c.execute("DELETE FROM volumes WHERE name = ?1", [name.as_str()])?;
            Ok(())
        })
        .await
    }

    /// All volumes, while the daemon opens. A row that cannot be read stays and is reported.
    pub fn volumes_at_start(&self) -> Result<Vec<VolumeRecord>, DbError> {
        let rows = self.run_blocking(|c| {
            let mut statement = c.prepare("SELECT name, record FROM volumes ORDER BY name")?;
            let rows = statement.query_map([], |row| {
                Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?))
            })?;
            Ok(rows.collect::<Result<Vec<_>, _>>()?)
        })?;
        let mut all = Vec::new();
        for (name, text) in rows {
            match serde_json::from_str::<VolumeRecord>(&text) {
                Ok(record) if record.version <= VOLUME_VERSION => all.push(record),
                Ok(record) => {
                    let version = record.version;
                    tracing::error!(
                        volume = name,
                        version,
                        "a volume of a later version is not used"
                    );
                }
                Err(error) => {
                    tracing::error!(volume = name, %error, "the record of a volume does not parse");
                }
            }
        }
        Ok(all)
    }
}
