//! Forking a running sandbox into live children.

use std::collections::BTreeMap;
use std::sync::Arc;

use forkd_api::SandboxInfo;
use forkd_types::SandboxId;

use crate::app::App;
use crate::branching;
use crate::error::Error;
use crate::sandbox::create::{self, CreateRequest};

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
    /// Freeze the user processes of the source for the cut.
    pub freeze: bool,
}

/// Cuts the sandbox and starts children from the cut, which lives on in them alone.
pub async fn fork(app: &Arc<App>, id: &SandboxId, wish: Fork) -> Result<Vec<SandboxInfo>, Error> {
    app.check_open()?;
    let sandbox = app.sandboxes.get(id)?;
    let cut = branching::cut_unnamed(app, &sandbox, wish.freeze).await?;
    let request = CreateRequest {
        tag: cut.published.manifest.tag.clone(),
        count: wish.count,
        owner: wish.owner,
        expires_at_unix: wish.expires_at_unix,
        memory_limit_mib: sandbox.record().memory_limit_mib,
        labels: wish.labels,
        workspace: None,
        id: None,
    };
    let source = app
        .blocking(move |app| create::source(app, cut.published))
        .await?;
    create::create_from(app, request, source).await
}
