//! The operations that `count` counts: what each needs before, and the request itself.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::bail;
use forkd_api::{
    BranchRequest, CheckpointRequest, ExecRequest, ForkRequest, RollbackRequest, SandboxInfo,
};
use forkd_types::MiB;

use crate::daemon::Daemon;
use crate::source::Source;

/// Name of the checkpoint that a roll-back returns to.
const POINT: &str = "count";

/// An operation to count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Operation {
    /// One child of a warm parent.
    Spawn,
    /// The first `true` in a child.
    Exec,
    /// The first `1` in the warm interpreter of a child.
    Eval,
    /// A branch of a running sandbox, until it is durable.
    Branch,
    /// A live fork of a running sandbox.
    Fork,
    /// A checkpoint of a running sandbox.
    Checkpoint,
    /// A roll-back to a checkpoint.
    Rollback,
}

impl Operation {
    pub const ALL: [Self; 7] = [
        Self::Spawn,
        Self::Exec,
        Self::Eval,
        Self::Branch,
        Self::Fork,
        Self::Checkpoint,
        Self::Rollback,
    ];
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Spawn => "spawn",
            Self::Exec => "exec",
            Self::Eval => "eval",
            Self::Branch => "branch",
            Self::Fork => "fork",
            Self::Checkpoint => "checkpoint",
            Self::Rollback => "rollback",
        })
    }
}

/// The daemon and the sizes that all rounds share.
pub struct Stage<'a> {
    pub daemon: &'a Daemon,
    pub tag: &'a str,
    pub dirty: MiB,
}

impl Stage<'_> {
    /// Makes the sandbox that the operation acts on, and lets the daemon finish: the pool refills.
    pub async fn prepare(&self, operation: Operation) -> anyhow::Result<Vec<SandboxInfo>> {
        let made = match operation {
            Operation::Spawn => Vec::new(),
            Operation::Exec | Operation::Eval => vec![self.daemon.start(self.tag).await?],
            Operation::Branch | Operation::Fork => vec![self.source().await?],
            Operation::Checkpoint => vec![self.source().await?],
            Operation::Rollback => {
                let info = self.source().await?;
                let request = CheckpointRequest {
                    name: Some(POINT.to_owned()),
                };
                self.daemon.client.checkpoint(&info.id, &request).await?;
                Source::from(self.daemon, info.clone())
                    .dirty(self.dirty)
                    .await?;
                vec![info]
            }
        };
        tokio::time::sleep(std::time::Duration::from_secs(2)).await;
        Ok(made)
    }

    /// A sandbox that was cut once and has changed its memory since.
    async fn source(&self) -> anyhow::Result<SandboxInfo> {
        let source = Source::start(self.daemon, self.tag, self.dirty).await?;
        let request = CheckpointRequest::default();
        self.daemon.client.checkpoint(source.id(), &request).await?;
        source.dirty(self.dirty).await?;
        Ok(source.into_info())
    }

    /// Does the operation. Returns the sandboxes that it made.
    pub async fn act(
        &self,
        operation: Operation,
        on: &[SandboxInfo],
        round: u8,
    ) -> anyhow::Result<Vec<SandboxInfo>> {
        let client = &self.daemon.client;
        let id = on.first().map_or("", |one| one.id.as_str());
        match operation {
            Operation::Spawn => return self.daemon.spawn(self.tag, 1).await,
            Operation::Fork => {
                let request = ForkRequest {
                    n: 1,
                    timeout_secs: None,
                    labels: BTreeMap::new(),
                    freeze: false,
                    network: None,
                };
                return Ok(client.fork(id, &request).await?);
            }
            Operation::Exec => {
                let request = ExecRequest {
                    args: vec!["true".to_owned()],
                    ..ExecRequest::default()
                };
                let answer = client.exec(id, &request).await?;
                if answer.exit_code != 0 {
                    bail!("`true` ended with {}", answer.exit_code);
                }
            }
            Operation::Eval => drop(self.daemon.eval(id, "1").await?),
            Operation::Branch => {
                let request = BranchRequest {
                    tag: Some(self.daemon.tag(&format!("{id}-{round}"))),
                    wait: true,
                    ..BranchRequest::default()
                };
                client.branch(id, &request).await?;
            }
            Operation::Checkpoint => {
                client.checkpoint(id, &CheckpointRequest::default()).await?;
            }
            Operation::Rollback => {
                let request = RollbackRequest {
                    to: Some(POINT.to_owned()),
                };
                client.rollback(id, &request).await?;
            }
        }
        Ok(Vec::new())
    }
}
