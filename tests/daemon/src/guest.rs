//! One sandbox, as a scenario uses it: run programs, read and write files, branch, fork.

use bytes::Bytes;
use forkd_api::{
    BranchMode, BranchRequest, ExecRequest, ExecResponse, ForkRequest, SandboxInfo, SandboxState,
    SnapshotInfo,
};
use forkd_rest_client::{Client, Error};
use futures::TryStreamExt;

/// A sandbox and the client that reaches its daemon.
#[derive(Debug, Clone)]
pub struct Sandbox {
    client: Client,
    pub id: String,
}

impl Sandbox {
    /// The sandbox of that id.
    pub fn new(client: &Client, id: &str) -> Self {
        Self {
            client: client.clone(),
            id: id.to_owned(),
        }
    }

    /// Those of an answer that run.
    pub fn running(client: &Client, answer: &[SandboxInfo]) -> Vec<Self> {
        answer
            .iter()
            .filter(|info| info.state == SandboxState::Running)
            .map(|info| Self::new(client, &info.id))
            .collect()
    }

    /// Runs a program.
    pub async fn run(&self, args: &[&str]) -> Result<ExecResponse, Error> {
        let request = ExecRequest {
            args: args.iter().map(ToString::to_string).collect(),
            ..ExecRequest::default()
        };
        self.client.exec(&self.id, &request).await
    }

    /// Writes a file.
    pub async fn write(&self, path: &str, text: &str) -> Result<(), Error> {
        let content = Ok::<_, std::convert::Infallible>(Bytes::from(text.to_owned()));
        let content = futures::stream::iter([content]);
        self.client
            .write_file(&self.id, path, None, content)
            .await
            .map(drop)
    }

    /// Reads a file that is text.
    pub async fn read(&self, path: &str) -> Result<String, Error> {
        let chunks = self.client.read_file(&self.id, path).await?;
        let bytes: Vec<Bytes> = chunks.try_collect().await?;
        Ok(String::from_utf8_lossy(&bytes.concat()).into_owned())
    }

    /// Branches to a tag and waits until the snapshot is durable.
    pub async fn branch(&self, tag: &str, mode: BranchMode) -> Result<SnapshotInfo, Error> {
        self.branch_with(tag, mode, false).await
    }

    /// As [`Self::branch`], with the user processes of the guest frozen.
    pub async fn branch_frozen(&self, tag: &str, mode: BranchMode) -> Result<SnapshotInfo, Error> {
        self.branch_with(tag, mode, true).await
    }

    async fn branch_with(
        &self,
        tag: &str,
        mode: BranchMode,
        freeze: bool,
    ) -> Result<SnapshotInfo, Error> {
        let request = BranchRequest {
            tag: Some(tag.to_owned()),
            mode: Some(mode),
            freeze,
            ..BranchRequest::default()
        };
        self.client.branch(&self.id, &request).await
    }

    /// Forks the running sandbox. Children that failed are left out.
    pub async fn fork(&self, n: u32) -> Result<Vec<Self>, Error> {
        self.fork_with(n, false).await
    }

    /// As [`Self::fork`], with the user processes of the guest frozen.
    pub async fn fork_frozen(&self, n: u32) -> Result<Vec<Self>, Error> {
        self.fork_with(n, true).await
    }

    async fn fork_with(&self, n: u32, freeze: bool) -> Result<Vec<Self>, Error> {
        let request = ForkRequest {
            n,
            timeout_secs: None,
            labels: Default::default(),
            freeze,
            network: None,
        };
        let children = self.client.fork(&self.id, &request).await?;
        Ok(Self::running(&self.client, &children))
    }

    /// As the daemon lists it; `None` if the daemon does not know it.
    ///
    /// # Panics
    ///
    /// Panics when the daemon does not answer.
    pub async fn info(&self) -> Option<SandboxInfo> {
        let all = self.client.sandboxes().await.expect("sandboxes are listed");
        all.into_iter().find(|info| info.id == self.id)
    }

    /// The daemon knows the sandbox as running.
    pub async fn runs(&self) -> bool {
        self.info()
            .await
            .is_some_and(|info| info.state == SandboxState::Running)
    }
}
