//! Requests about snapshots, the store and the daemon.

use forkd_api::DaemonStatus;
use forkd_api::routes::{self, fill};
use forkd_api::{
    CompactRequest, CreateSnapshot, FsckReport, Health, SnapshotDetail, SnapshotInfo, StoreUsage,
    UpdateSnapshot, Version,
};
use reqwest::Method;

use crate::{Client, Error};

impl Client {
    /// The health of the daemon.
    pub async fn health(&self) -> Result<Health, Error> {
        self.json(self.get(routes::HEALTHZ)).await
    }

    /// The version of the daemon.
    pub async fn version(&self) -> Result<Version, Error> {
        self.json(self.get(routes::VERSION)).await
    }

    /// The walls around sandboxes.
    pub async fn status(&self) -> Result<DaemonStatus, Error> {
        self.json(self.get(routes::STATUS)).await
    }

    /// The metrics of the daemon, in Prometheus' text format.
    pub async fn metrics(&self) -> Result<String, Error> {
        self.text(self.get(routes::METRICS)).await
    }

    /// Lists the snapshots of the owner.
    pub async fn snapshots(&self) -> Result<Vec<SnapshotInfo>, Error> {
        self.json(self.get(routes::SNAPSHOTS)).await
    }

    /// Boots a parent, warms it up and freezes it.
    pub async fn create_snapshot(&self, request: &CreateSnapshot) -> Result<SnapshotInfo, Error> {
        self.json(self.post(routes::SNAPSHOTS, request)).await
    }

    /// Describes a snapshot.
    pub async fn snapshot(&self, tag: &str) -> Result<SnapshotDetail, Error> {
        self.json(self.get(&fill(routes::SNAPSHOT_INFO, &[tag])))
            .await
    }

    /// Copies a snapshot into one that depends on no parent.
    pub async fn compact(&self, from: &str, to: &str) -> Result<SnapshotInfo, Error> {
        let request = CompactRequest { to: to.to_owned() };
        self.json(self.post(&fill(routes::SNAPSHOT_COMPACT, &[from]), &request))
            .await
    }

    /// Changes a snapshot.
    pub async fn update_snapshot(
        &self,
        tag: &str,
        request: &UpdateSnapshot,
    ) -> Result<SnapshotDetail, Error> {
        let path = fill(routes::SNAPSHOT, &[tag]);
        self.json(self.request(Method::PATCH, &path).json(request))
            .await
    }

    /// Deletes a snapshot. `cascade` deletes its dependents too; `force` deletes it although dependents exist.
    pub async fn delete_snapshot(
        &self,
        tag: &str,
        cascade: bool,
        force: bool,
    ) -> Result<(), Error> {
        let mut path = fill(routes::SNAPSHOT, &[tag]);
        if cascade || force {
            path.push_str(&format!("?cascade={cascade}&force={force}"));
        }
        self.nothing(self.request(Method::DELETE, &path)).await
    }

    /// Disk usage of the store.
    pub async fn store(&self) -> Result<StoreUsage, Error> {
        self.json(self.get(routes::STORE)).await
    }

    /// Checks the store for damage; `deep` reads every blob.
    pub async fn fsck(&self, deep: bool) -> Result<FsckReport, Error> {
        let path = format!("{}?deep={deep}", routes::STORE_FSCK);
        self.json(self.request(Method::POST, &path)).await
    }
}
