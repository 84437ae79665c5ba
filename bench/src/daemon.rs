//! The connection of a benchmark to a daemon.
//!
//! All tags of a run share a prefix. [`run`] removes every sandbox and snapshot of the run at the end, also
//! after an error.

use std::future::Future;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use forkd_api::{CreateSandboxes, CreateSnapshot, SandboxInfo, SandboxState};
use forkd_rest_client::{Client, Target};
use forkd_types::MiB;
use futures::StreamExt;

use crate::output::OutputArgs;

/// Sandboxes that are deleted at the same time.
const ENDINGS: usize = 32;

/// Arguments that select the daemon and the image.
#[derive(Debug, clap::Args)]
pub struct DaemonArgs {
    /// The image that parents boot from.
    #[arg(long, default_value = "python-numpy", value_name = "NAME")]
    image: String,

    /// Address of the daemon.
    #[arg(
        long,
        env = "FORKD_URL",
        default_value = forkd_api::DEFAULT_URL,
        value_name = "URL"
    )]
    daemon_url: String,

    /// Token for the daemon.
    #[arg(
        long,
        env = "FORKD_TOKEN",
        hide_env_values = true,
        value_name = "TOKEN"
    )]
    daemon_token: Option<String>,

    /// Certificates (PEM) to trust besides those of the host, for https.
    #[arg(long, env = "FORKD_CACERT", value_name = "FILE")]
    daemon_cacert: Option<PathBuf>,
}

impl DaemonArgs {
    /// Address of the daemon. An empty variable counts as unset.
    pub fn url(&self) -> &str {
        match self.daemon_url.as_str() {
            "" => forkd_api::DEFAULT_URL,
            url => url,
        }
    }
}

/// Arguments of benchmarks that repeat their measurements.
#[derive(Debug, clap::Args)]
pub struct MeasureArgs {
    /// How often each is repeated
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub rounds: u8,

    #[command(flatten)]
    pub daemon: DaemonArgs,

    #[command(flatten)]
    pub output: OutputArgs,
}

/// A connection, and the prefix of all tags of this run.
#[derive(Debug)]
pub struct Daemon {
    pub client: Client,
    image: String,
    prefix: String,
}

impl Daemon {
    fn connect(args: &DaemonArgs, what: &str) -> anyhow::Result<Self> {
        let target: Target = args.url().parse()?;
        let token = args.daemon_token.clone();
        let cacert = args.daemon_cacert.as_deref();
        let client = match cacert.filter(|path| !path.as_os_str().is_empty()) {
            Some(path) => {
                let pem = std::fs::read(path)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                Client::trusting(&target, token, &pem)?
            }
            None => Client::new(&target, token)?,
        };
        Ok(Self {
            client,
            image: args.image.clone(),
            prefix: format!("bench-{what}-{}-", std::process::id()),
        })
    }

    /// A tag with the prefix of this run.
    pub fn tag(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Builds a warm parent and returns its tag.
    pub async fn parent(&self, memory: MiB) -> anyhow::Result<String> {
        self.parent_named(&format!("parent-{}", memory.0), memory)
            .await
    }

    /// Builds a warm parent under this name and returns its tag.
    pub async fn parent_named(&self, name: &str, memory: MiB) -> anyhow::Result<String> {
        eprintln!("warming a parent of {memory} up");
        let tag = self.tag(name);
        let request = CreateSnapshot {
            tag: tag.clone(),
            image: Some(self.image.clone()),
            mem_size_mib: Some(memory.0),
            rw: true,
            ..CreateSnapshot::default()
        };
        self.client
            .create_snapshot(&request)
            .await
            .context("the daemon made no parent")?;
        Ok(tag)
    }

    /// Starts children of a tag and waits until all are ready.
    pub async fn spawn(&self, tag: &str, n: usize) -> anyhow::Result<Vec<SandboxInfo>> {
        let request = CreateSandboxes {
            snapshot_tag: tag.to_owned(),
            n: u32::try_from(n)?,
            ..CreateSandboxes::default()
        };
        let children = self.client.spawn(&request).await?;
        let failed = |child: &&SandboxInfo| child.state != SandboxState::Running;
        if let Some(failed) = children.iter().find(failed) {
            bail!(
                "child {} is {:?}: {:?}",
                failed.id,
                failed.state,
                failed.error
            );
        }
        Ok(children)
    }

    pub async fn start(&self, tag: &str) -> anyhow::Result<SandboxInfo> {
        self.spawn(tag, 1).await?.pop().context("no child came")
    }

    /// Runs Python in the warm interpreter and returns the printed value.
    pub async fn eval(&self, id: &str, code: &str) -> anyhow::Result<String> {
        let answer = self.client.eval(id, code).await?;
        match answer.error {
            Some(error) => bail!("sandbox {id}: {error}"),
            None => Ok(answer.result.unwrap_or_default()),
        }
    }

    pub async fn end(&self, children: Vec<SandboxInfo>) {
        futures::stream::iter(children)
            .for_each_concurrent(ENDINGS, |child| async move {
                // A failed sandbox is gone already.
                let _ = self.client.kill(&child.id).await;
            })
            .await;
    }

    /// Deletes the remaining sandboxes of this run.
    pub async fn end_all(&self) {
        let all = self.client.sandboxes().await.unwrap_or_default();
        let left = all
            .into_iter()
            .filter(|one| one.snapshot_tag.starts_with(&self.prefix));
        self.end(left.collect()).await;
    }

    /// Deletes a snapshot of this run, or cancels its build.
    pub async fn remove(&self, name: &str) {
        // A failed build left nothing to delete.
        let _ = self
            .client
            .delete_snapshot(&self.tag(name), true, false)
            .await;
    }

    /// Deletes the remaining sandboxes and snapshots of this run.
    async fn clean_up(&self) {
        self.end_all().await;
        let ours = |tag: &str| tag.starts_with(&self.prefix);
        // Snapshots based on another one are deleted with it.
        let mut tags = self.client.snapshots().await.unwrap_or_default();
        tags.retain(|info| ours(&info.tag) && info.parent_tag.is_none());
        for info in tags {
            let removed = self.client.delete_snapshot(&info.tag, true, false).await;
            if let Err(error) = removed {
                eprintln!("the snapshot {} stays: {error}", info.tag);
            }
        }
    }
}

/// Time from the request until each child was ready.
pub fn ready(children: &[SandboxInfo]) -> Vec<Duration> {
    children
        .iter()
        .filter_map(|child| child.ready_us)
        .map(Duration::from_micros)
        .collect()
}

/// Runs a benchmark with a daemon. Removes its sandboxes and snapshots in any case.
pub fn run<T, F>(args: &DaemonArgs, what: &str, bench: F) -> anyhow::Result<T>
where
    F: AsyncFnOnce(&Daemon) -> anyhow::Result<T>,
{
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let daemon = Daemon::connect(args, what)?;
    runtime.block_on(async {
        let measured = interruptible(bench(&daemon)).await;
        daemon.clean_up().await;
        measured
    })
}

async fn interruptible<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::select! {
        measured = work => measured,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
    }
}
