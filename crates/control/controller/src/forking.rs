//! Forking a running sandbox into live children.

use std::collections::BTreeMap;
use std::sync::Arc;

use forkd_api::SandboxInfo;
use forkd_store::Deletion;
use forkd_types::{SandboxId, Tag};

use crate::app::App;
use crate::branching;
use crate::error::Error;
use crate::sandbox::CutMode;
use crate::sandbox::create::{self, CreateRequest};
use crate::snapshots::{self, HIDDEN};

/// A checked wish for children of a running sandbox.
#[derive(Debug, Clone)]
pub struct Fork {
    /// How many.
    pub count: usize,
    /// Who asks.
    pub owner: String,
    /// When they are to be deleted.
    pub expires_at_unix: Option<u64>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
}

/// Cuts the sandbox, starts children from the cut, and lets go of it: its content lives on in them.
pub async fn fork(app: &Arc<App>, id: &SandboxId, wish: Fork) -> Result<Vec<SandboxInfo>, Error> {
    app.check_open()?;
    let sandbox = app.sandboxes.get(id)?;
    let tag: Tag = format!("{HIDDEN}fork-{:016x}", rand::random::<u64>())
        .parse()
        .map_err(|_| Error::Task)?;
    let cut = branching::cut_hidden(app, &sandbox, &tag, CutMode::Diff).await?;
    let request = CreateRequest {
        tag: tag.clone(),
        count: wish.count,
        owner: wish.owner,
        expires_at_unix: wish.expires_at_unix,
        memory_limit_mib: sandbox.record().memory_limit_mib,
        labels: wish.labels,
        workspace: None,
        id: None,
    };
    let made = async {
        let source = app
            .blocking(move |app| create::source(app, cut.published))
            .await?;
        create::create_from(app, request, source).await
    }
    .await;
    // The children live without it; what is left is removed at the next start.
    if let Err(error) = snapshots::delete(app, tag.clone(), Deletion::Force).await {
        tracing::warn!(%tag, error = error.chain(), "not deleted");
    }
    made
}
