//! Starting and deleting sandboxes, for `spawn`, `fork`, `run` and `quickstart`.

use forkd_api::{CreateSandboxes, ForkRequest, SandboxInfo, UpdateSandbox};
use forkd_rest_client::Client;
use futures::StreamExt;

use crate::daemon::failed;
use crate::error::CliError;

/// Concurrent requests when sandboxes are deleted.
const PARALLEL: usize = 32;

/// Starts children from a snapshot, or from a running sandbox, whose limits they inherit. `freeze` is about the processes
/// in the running sandbox.
pub async fn start(
    client: &Client,
    sandbox: Option<&str>,
    freeze: bool,
    request: CreateSandboxes,
) -> Result<Vec<SandboxInfo>, CliError> {
    let started = match sandbox {
        Some(id) => {
            let request = ForkRequest {
                n: request.n,
                timeout_secs: request.timeout_secs,
                labels: request.labels,
                freeze,
                network: request.network,
            };
            client.fork(id, &request).await
        }
        None => client.spawn(&request).await,
    };
    started.map_err(failed)
}

/// Seconds from now until the daemon deletes a sandbox; 0 is never.
pub async fn set_lifetime(client: &Client, id: &str, seconds: u64) -> Result<(), CliError> {
    let request = UpdateSandbox {
        timeout_secs: Some(seconds),
        ..UpdateSandbox::default()
    };
    client.update(id, &request).await.map(drop).map_err(failed)
}

/// Deletes sandboxes. Errors are ignored: a failed or expired sandbox is already gone, and the daemon deletes the others
/// when their lifetime is over.
pub async fn end(client: &Client, children: &[SandboxInfo]) {
    futures::stream::iter(children)
        .for_each_concurrent(PARALLEL, |child| async move {
            let _ = client.kill(&child.id).await;
        })
        .await;
}
