//! Sandboxes and workspaces.

use forkd_api::routes::{self, fill};
use forkd_api::{
    BranchRequest, CheckpointInfo, CheckpointRequest, CreateSandboxes, CreateWorkspace,
    ForkRequest, RollbackInfo, RollbackRequest, SandboxInfo, SandboxStats, SnapshotInfo,
    SuspendRequest, UpdateSandbox, WorkspaceInfo,
};
use reqwest::Method;

use crate::{Client, Error};

impl Client {
    /// Starts children of a snapshot.
    pub async fn spawn(&self, request: &CreateSandboxes) -> Result<Vec<SandboxInfo>, Error> {
        self.json(self.post(routes::SANDBOXES, request)).await
    }

    /// Live sandboxes.
    pub async fn sandboxes(&self) -> Result<Vec<SandboxInfo>, Error> {
        self.json(self.get(routes::SANDBOXES)).await
    }

    /// What each live sandbox uses.
    pub async fn stats(&self) -> Result<Vec<SandboxStats>, Error> {
        self.json(self.get(routes::STATS)).await
    }

    /// Ends a sandbox.
    pub async fn kill(&self, id: &str) -> Result<(), Error> {
        self.nothing(self.request(Method::DELETE, &fill(routes::SANDBOX, &[id])))
            .await
    }

    /// Changes labels or lifetime.
    pub async fn update(&self, id: &str, request: &UpdateSandbox) -> Result<SandboxInfo, Error> {
        let route = fill(routes::SANDBOX, &[id]);
        self.json(self.request(Method::PATCH, &route).json(request))
            .await
    }

    /// Cuts a sandbox into a new snapshot.
    pub async fn branch(&self, id: &str, request: &BranchRequest) -> Result<SnapshotInfo, Error> {
        self.json(self.post(&fill(routes::BRANCH, &[id]), request))
            .await
    }

    /// Forks a sandbox into live children.
    pub async fn fork(&self, id: &str, request: &ForkRequest) -> Result<Vec<SandboxInfo>, Error> {
        self.json(self.post(&fill(routes::FORK, &[id]), request))
            .await
    }

    /// The checkpoints of a sandbox.
    pub async fn checkpoints(&self, id: &str) -> Result<Vec<CheckpointInfo>, Error> {
        self.json(self.request(Method::GET, &fill(routes::CHECKPOINTS, &[id])))
            .await
    }

    /// Keeps a sandbox's state to go back to.
    pub async fn checkpoint(
        &self,
        id: &str,
        request: &CheckpointRequest,
    ) -> Result<CheckpointInfo, Error> {
        self.json(self.post(&fill(routes::CHECKPOINTS, &[id]), request))
            .await
    }

    /// Forgets a checkpoint.
    pub async fn drop_checkpoint(&self, id: &str, name: &str) -> Result<(), Error> {
        let route = fill(routes::CHECKPOINT, &[id, name]);
        self.nothing(self.request(Method::DELETE, &route)).await
    }

    /// Goes back to a checkpoint.
    pub async fn rollback(
        &self,
        id: &str,
        request: &RollbackRequest,
    ) -> Result<RollbackInfo, Error> {
        self.json(self.post(&fill(routes::ROLLBACK, &[id]), request))
            .await
    }

    /// Every workspace.
    pub async fn workspaces(&self) -> Result<Vec<WorkspaceInfo>, Error> {
        self.json(self.get(routes::WORKSPACES)).await
    }

    /// Makes a workspace and starts it.
    pub async fn create_workspace(
        &self,
        request: &CreateWorkspace,
    ) -> Result<WorkspaceInfo, Error> {
        self.json(self.post(routes::WORKSPACES, request)).await
    }

    /// Writes a workspace's state down and gives its memory back.
    pub async fn suspend_workspace(&self, name: &str, diff: bool) -> Result<WorkspaceInfo, Error> {
        let request = SuspendRequest { diff };
        self.json(self.post(&fill(routes::WORKSPACE_SUSPEND, &[name]), &request))
            .await
    }

    /// Starts a workspace again.
    pub async fn resume_workspace(&self, name: &str) -> Result<WorkspaceInfo, Error> {
        self.json(self.request(Method::POST, &fill(routes::WORKSPACE_RESUME, &[name])))
            .await
    }

    /// Ends a workspace and forgets its state.
    pub async fn delete_workspace(&self, name: &str) -> Result<(), Error> {
        self.nothing(self.request(Method::DELETE, &fill(routes::WORKSPACE, &[name])))
            .await
    }
}
