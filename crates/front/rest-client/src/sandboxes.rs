//! Requests about sandboxes and workspaces.

use forkd_api::routes::{self, fill};
use forkd_api::{
    BranchRequest, CheckpointInfo, CheckpointRequest, CreateSandboxes, CreateWorkspace,
    ForkRequest, RollbackInfo, RollbackRequest, SandboxInfo, SandboxStats, SnapshotInfo,
    SuspendRequest, UpdateSandbox, WorkspaceInfo,
};
use reqwest::Method;

use crate::{Client, Error};

impl Client {
    /// Starts children from a snapshot.
    pub async fn spawn(&self, request: &CreateSandboxes) -> Result<Vec<SandboxInfo>, Error> {
        self.json(self.post(routes::SANDBOXES, request)).await
    }

    /// Lists live sandboxes.
    pub async fn sandboxes(&self) -> Result<Vec<SandboxInfo>, Error> {
        self.json(self.get(routes::SANDBOXES)).await
    }

    /// Describes a live sandbox.
    pub async fn sandbox(&self, id: &str) -> Result<SandboxInfo, Error> {
        self.json(self.get(&fill(routes::SANDBOX, &[id]))).await
    }

    /// Memory, CPU time and disk traffic of each live sandbox.
    pub async fn stats(&self) -> Result<Vec<SandboxStats>, Error> {
        self.json(self.get(routes::STATS)).await
    }

    /// Stops the vCPUs of a sandbox.
    pub async fn pause(&self, id: &str) -> Result<SandboxInfo, Error> {
        let route = fill(routes::PAUSE, &[id]);
        self.json(self.request(Method::POST, &route)).await
    }

    /// Lets a paused sandbox go on.
    pub async fn resume(&self, id: &str) -> Result<SandboxInfo, Error> {
        let route = fill(routes::RESUME, &[id]);
        self.json(self.request(Method::POST, &route)).await
    }

    /// Changes the lifetime, the labels or the limits of a sandbox.
    pub async fn update(&self, id: &str, request: &UpdateSandbox) -> Result<SandboxInfo, Error> {
        let route = fill(routes::SANDBOX, &[id]);
        self.json(self.request(Method::PATCH, &route).json(request))
            .await
    }

    /// Deletes a sandbox.
    pub async fn kill(&self, id: &str) -> Result<(), Error> {
        self.nothing(self.request(Method::DELETE, &fill(routes::SANDBOX, &[id])))
            .await
    }

    /// Freezes a running sandbox as a snapshot.
    pub async fn branch(&self, id: &str, request: &BranchRequest) -> Result<SnapshotInfo, Error> {
        self.json(self.post(&fill(routes::BRANCH, &[id]), request))
            .await
    }

    /// Starts children from a running sandbox.
    pub async fn fork(&self, id: &str, request: &ForkRequest) -> Result<Vec<SandboxInfo>, Error> {
        self.json(self.post(&fill(routes::FORK, &[id]), request))
            .await
    }

    /// Lists the checkpoints of a sandbox.
    pub async fn checkpoints(&self, id: &str) -> Result<Vec<CheckpointInfo>, Error> {
        self.json(self.request(Method::GET, &fill(routes::CHECKPOINTS, &[id])))
            .await
    }

    /// Makes a checkpoint of a sandbox.
    pub async fn checkpoint(
        &self,
        id: &str,
        request: &CheckpointRequest,
    ) -> Result<CheckpointInfo, Error> {
        self.json(self.post(&fill(routes::CHECKPOINTS, &[id]), request))
            .await
    }

    /// Deletes a checkpoint.
    pub async fn drop_checkpoint(&self, id: &str, name: &str) -> Result<(), Error> {
        let route = fill(routes::CHECKPOINT, &[id, name]);
        self.nothing(self.request(Method::DELETE, &route)).await
    }

    /// Returns a sandbox to a checkpoint.
    pub async fn rollback(
        &self,
        id: &str,
        request: &RollbackRequest,
    ) -> Result<RollbackInfo, Error> {
        self.json(self.post(&fill(routes::ROLLBACK, &[id]), request))
            .await
    }

    /// Lists the workspaces of the owner.
    pub async fn workspaces(&self) -> Result<Vec<WorkspaceInfo>, Error> {
        self.json(self.get(routes::WORKSPACES)).await
    }

    /// Creates a workspace and starts it.
    pub async fn create_workspace(
        &self,
        request: &CreateWorkspace,
    ) -> Result<WorkspaceInfo, Error> {
        self.json(self.post(routes::WORKSPACES, request)).await
    }

    /// Writes the state of a workspace to disk and frees its memory.
    pub async fn suspend_workspace(&self, name: &str, diff: bool) -> Result<WorkspaceInfo, Error> {
        let request = SuspendRequest { diff };
        self.json(self.post(&fill(routes::WORKSPACE_SUSPEND, &[name]), &request))
            .await
    }

    /// Starts a suspended workspace.
    pub async fn resume_workspace(&self, name: &str) -> Result<WorkspaceInfo, Error> {
        self.json(self.request(Method::POST, &fill(routes::WORKSPACE_RESUME, &[name])))
            .await
    }

    /// Deletes a workspace and its state.
    pub async fn delete_workspace(&self, name: &str) -> Result<(), Error> {
        self.nothing(self.request(Method::DELETE, &fill(routes::WORKSPACE, &[name])))
            .await
    }
}
