//! The daemon of this host, and what a benchmark leaves there until it ends.

use std::future::Future;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use forkd_api::{CreateSandboxes, CreateSnapshot, SandboxInfo, SandboxState};
use forkd_rest_client::{Client, Target};
use forkd_types::MiB;
use futures::StreamExt;

use crate::output::OutputArgs;

/// Requests to end a sandbox that are under way at once.
const ENDINGS: usize = 32;

/// Which daemon, and which image.
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

    /// Bearer token for it.
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

/// What measurements that are repeated take.
#[derive(Debug, clap::Args)]
pub struct MeasureArgs {
    /// How often each is repeated
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub rounds: u8,

    /// Where.
    #[command(flatten)]
    pub daemon: DaemonArgs,

    /// How to print what was found.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// A connection, and a prefix that all tags of this run have.
#[derive(Debug)]
pub struct Daemon {
    /// The connection.
    pub client: Client,
    image: String,
    prefix: String,
}

impl Daemon {
    fn connect(args: &DaemonArgs, what: &str) -> anyhow::Result<Self> {
        // A variable that is empty counts as not set.
        let url = match args.daemon_url.as_str() {
            "" => forkd_api::DEFAULT_URL,
            url => url,
        };
        let target: Target = url.parse()?;
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

    /// A tag of this run.
    pub fn tag(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Warms a parent up; gives its tag.
    pub async fn parent(&self, memory: MiB) -> anyhow::Result<String> {
        eprintln!("warming a parent of {memory} up");
        let tag = self.tag(&format!("parent-{}", memory.0));
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

    /// Starts children of a tag and waits until all have answered.
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

    /// Starts one child.
    pub async fn start(&self, tag: &str) -> anyhow::Result<SandboxInfo> {
        self.spawn(tag, 1).await?.pop().context("no child came")
    }

    /// Runs Python in the warm interpreter; gives the value as it prints.
    pub async fn eval(&self, id: &str, code: &str) -> anyhow::Result<String> {
        let answer = self.client.eval(id, code).await?;
        match answer.error {
            Some(error) => bail!("sandbox {id}: {error}"),
            None => Ok(answer.result.unwrap_or_default()),
        }
    }

    /// Ends sandboxes.
    pub async fn end(&self, children: Vec<SandboxInfo>) {
        futures::stream::iter(children)
            .for_each_concurrent(ENDINGS, |child| async move {
                // One that has failed is gone already.
                let _ = self.client.kill(&child.id).await;
            })
            .await;
    }

    /// Ends what is left of this run and removes its snapshots.
    async fn clean_up(&self) {
        let all = self.client.sandboxes().await.unwrap_or_default();
        let ours = |tag: &str| tag.starts_with(&self.prefix);
        let left = all.into_iter().filter(|one| ours(&one.snapshot_tag));
        self.end(left.collect()).await;
        // What builds on another one goes with it.
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

/// When a child was ready, counted from the request.
pub fn ready(children: &[SandboxInfo]) -> Vec<Duration> {
    children
        .iter()
        .filter_map(|child| child.ready_us)
        .map(Duration::from_micros)
        .collect()
}

/// Runs a benchmark with a daemon; whatever becomes of it, nothing stays there.
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
