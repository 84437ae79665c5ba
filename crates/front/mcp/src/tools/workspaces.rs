//! Tools about workspaces: sandboxes with a name that can be suspended to disk.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::snapshots::{Deleted, Nothing};
use crate::call::Call;
use crate::refusal::Refusal;
use crate::tool::{Effect, Set, Tool};

/// A workspace as a model sees it.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Workspace {
    /// Name of the workspace.
    name: String,
    /// `running`, `suspended` or `stale`.
    status: String,
    /// ID of its sandbox, while it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox_id: Option<String>,
    /// Tag from which the workspace was first started.
    snapshot_tag: String,
}

impl From<forkd_api::WorkspaceInfo> for Workspace {
    fn from(info: forkd_api::WorkspaceInfo) -> Self {
        use forkd_api::WorkspaceStatus::{Running, Stale, Suspended};
        Self {
            name: info.name,
            status: match info.status {
                Running => "running",
                Suspended => "suspended",
                Stale => "stale",
            }
            .to_owned(),
            sandbox_id: info.live_sandbox_id,
            snapshot_tag: info.source_snapshot_tag,
        }
    }
}

/// A list of workspaces.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Workspaces {
    /// The workspaces of the owner.
    result: Vec<Workspace>,
}

/// Implements the tool `list_workspaces`.
pub struct ListWorkspaces;

impl Tool for ListWorkspaces {
    const NAME: &'static str = "list_workspaces";
    const TITLE: &'static str = "List workspaces";
    const ABOUT: &'static str = "List workspaces: sandboxes with a name that keep their state on disk while they are suspended.";
    const SET: Set = Set::All;
    const EFFECT: Effect = Effect::Reads;
    type Input = Nothing;
    type Output = Workspaces;

    async fn run(call: &Call<'_>, _: Nothing) -> Result<Workspaces, Refusal> {
        let found = call.client.workspaces().await?;
        Ok(Workspaces {
            result: found.into_iter().map(Into::into).collect(),
        })
    }
}

/// Arguments of the tool `create_workspace`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateInput {
    /// Name of the new workspace: letters, digits, '.', '_' and '-'.
    #[schemars(length(min = 1, max = 64))]
    name: String,
    /// Tag of the snapshot to start from.
    #[schemars(length(min = 1, max = 64))]
    snapshot_tag: String,
}

/// Implements the tool `create_workspace`.
pub struct CreateWorkspace;

impl Tool for CreateWorkspace {
    const NAME: &'static str = "create_workspace";
    const TITLE: &'static str = "Create a workspace";
    const ABOUT: &'static str =
        "Start a sandbox with a name. It has no end of life and can be suspended and resumed.";
    const SET: Set = Set::All;
    const EFFECT: Effect = Effect::Adds;
    type Input = CreateInput;
    type Output = Workspace;

    async fn run(call: &Call<'_>, input: CreateInput) -> Result<Workspace, Refusal> {
        let request = forkd_api::CreateWorkspace {
            network: None,
            name: input.name,
            snapshot_tag: input.snapshot_tag,
            per_child_netns: false,
            memory_limit_mib: None,
        };
        Ok(call.client.create_workspace(&request).await?.into())
    }
}

/// The name of a workspace.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ByName {
    /// Name of the workspace, as list_workspaces shows it.
    #[schemars(length(min = 1, max = 64))]
    name: String,
}

/// Implements the tool `suspend_workspace`.
pub struct SuspendWorkspace;

impl Tool for SuspendWorkspace {
    const NAME: &'static str = "suspend_workspace";
    const TITLE: &'static str = "Suspend a workspace";
    const ABOUT: &'static str = "Write the state of a workspace to disk and free its memory.";
    const SET: Set = Set::All;
    const EFFECT: Effect = Effect::Replaces;
    type Input = ByName;
    type Output = Workspace;

    async fn run(call: &Call<'_>, input: ByName) -> Result<Workspace, Refusal> {
        Ok(call
            .client
            .suspend_workspace(&input.name, true)
            .await?
            .into())
    }
}

/// Implements the tool `resume_workspace`.
pub struct ResumeWorkspace;

impl Tool for ResumeWorkspace {
    const NAME: &'static str = "resume_workspace";
    const TITLE: &'static str = "Resume a workspace";
    const ABOUT: &'static str =
        "Start a suspended workspace where it was. Its sandbox has a new ID.";
    const SET: Set = Set::All;
    const EFFECT: Effect = Effect::Adds;
    type Input = ByName;
    type Output = Workspace;

    async fn run(call: &Call<'_>, input: ByName) -> Result<Workspace, Refusal> {
        Ok(call.client.resume_workspace(&input.name).await?.into())
    }
}

/// Implements the tool `delete_workspace`.
pub struct DeleteWorkspace;

impl Tool for DeleteWorkspace {
    const NAME: &'static str = "delete_workspace";
    const TITLE: &'static str = "Delete a workspace";
    const ABOUT: &'static str = "Delete a workspace with its sandbox and its state on disk.";
    const SET: Set = Set::All;
    const EFFECT: Effect = Effect::Replaces;
    type Input = ByName;
    type Output = Deleted;

    async fn run(call: &Call<'_>, input: ByName) -> Result<Deleted, Refusal> {
        call.client.delete_workspace(&input.name).await?;
        Ok(Deleted {
            name: input.name,
            deleted: true,
        })
    }
}
