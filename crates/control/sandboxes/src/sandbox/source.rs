//! A snapshot that children are started from.

use std::sync::Arc;

use forkd_store::{Lease, Manifest, Parent, Published};
use forkd_types::Tag;

use crate::app::App;
use crate::error::Error;
use crate::launch::SnapshotFiles;

/// A snapshot ready to be started from: its files are open, its blobs leased.
#[derive(Debug)]
pub struct SourceSnapshot {
    pub(crate) manifest: Arc<Manifest>,
    pub(crate) files: SnapshotFiles,
    /// The snapshot that children name as the one they were started from. For a live cut, which has no name, that of the
    /// source.
    pub(crate) lineage: Parent,
    /// Later children can start from it, too.
    named: bool,
    /// Keeps the blobs until every child has its own lease.
    _lease: Lease,
}

impl SourceSnapshot {
    /// Opens the files of a tag.
    pub async fn open(app: &Arc<App>, tag: &Tag) -> Result<Self, Error> {
        if app.writing.is_writing(tag) {
            return Err(Error::StillWriting { tag: tag.clone() });
        }
        let tag = tag.clone();
        app.blocking(move |app| {
            let published = app
                .store
                .get(&tag)
                .map_err(Error::store(format!("snapshot {tag} cannot be used")))?;
            let lineage = Parent {
                tag,
                digest: published.manifest.digest(),
            };
            Self::of(app, published, lineage, true)
        })
        .await
    }

    /// Opens the files of a cut that has no name.
    pub async fn of_cut(app: &Arc<App>, cut: Published, lineage: Parent) -> Result<Self, Error> {
        app.blocking(move |app| Self::of(app, cut, lineage, false))
            .await
    }

    fn of(app: &App, published: Published, lineage: Parent, named: bool) -> Result<Self, Error> {
        Ok(Self {
            files: SnapshotFiles::open(&app.store, &app.touched, &published.manifest)?,
            manifest: published.manifest,
            lineage,
            named,
            _lease: published.lease,
        })
    }

    /// The first child records which pages it touches until it is ready, for the children after it.
    pub(super) fn records_touched(&self) -> bool {
        self.named && self.files.lacks_touched()
    }
}
