//! Forking a running sandbox into live children.
//!
//! [`fork`] cuts the sandbox without a tag and starts the children from the cut. The content of the cut lives as long
//! as the children use it.

use std::collections::BTreeMap;
use std::sync::Arc;

use forkd_api::SandboxInfo;
use forkd_types::{Policy, SandboxId};

use super::branch::cut;
use super::secrets;
use super::spawn::{self, CreateRequest};
use crate::app::App;
use crate::error::Error;
use crate::sandbox::{CutMode, Destination, SourceSnapshot};
use crate::state::OnExpiry;

/// A checked request for children of a running sandbox.
#[derive(Debug, Clone)]
pub struct Fork {
    pub count: usize,
    pub owner: String,
    /// When they are to be deleted.
    pub expires_at_unix: Option<u64>,
    /// Whether they are deleted or suspended then.
    pub on_expiry: OnExpiry,
    pub labels: BTreeMap<String, String>,
    /// Freeze the user processes of the source for the cut.
    pub freeze: bool,
    /// The network policy of the children; that of the sandbox if missing.
    pub network: Option<Policy>,
}

/// Cuts the sandbox and starts children from the cut, which lives on in them alone. The children descend from the snapshot
/// that the sandbox was started from.
pub async fn fork(app: &Arc<App>, id: &SandboxId, fork: Fork) -> Result<Vec<SandboxInfo>, Error> {
    app.check_open()?;
    let sandbox = app.sandboxes.get(id)?;
    // Everything that can be refused is refused before the source is stopped.
    let slots = app.limits.children(&fork.owner, fork.count)?;
    let cut_slot = app.cut_slot().await?;
    let record = sandbox.record();
    let lineage = record.as_parent();
    // A fork inherits no secret: a request that wants one names it.
    let inherited = || record.network.policy().without_inject();
    let network = fork.network.unwrap_or_else(inherited);
    app.check_network(&network)?;
    secrets::check(app, &fork.owner, &network).await?;
    let request = CreateRequest {
        tag: record.tag,
        count: fork.count,
        owner: fork.owner,
        expires_at_unix: fork.expires_at_unix,
        on_expiry: fork.on_expiry,
        memory_limit_mib: record.memory_limit_mib,
        limits: record.limits,
        network,
        labels: fork.labels,
        env: record.env,
        metadata: record.metadata,
        workspace: None,
        id: None,
        ports: record.ports.of_fork(),
        per_child_netns: false,
    };
    let made = cut(&sandbox, Destination::Live, CutMode::Diff, fork.freeze).await?;
    drop(cut_slot);
    let source = SourceSnapshot::of_cut(app, made.published, lineage).await?;
    let children = spawn::start_from(app, &request, source, slots).await?;
    spawn::ready(&children).await
}
