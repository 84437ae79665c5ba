//! Sandboxes that a command starts for itself.

use forkd_api::{CreateSandboxes, ForkRequest, SandboxInfo};
use forkd_rest_client::Client;
use futures::StreamExt;

use crate::daemon::failed;
use crate::error::CliError;
use crate::ui::Ui;

/// Requests to end one that are under way at once.
const PARALLEL: usize = 32;

/// Starts children of a snapshot, or of a running sandbox, whose limits they have.
pub async fn start(
    client: &Client,
    sandbox: Option<&str>,
    request: CreateSandboxes,
) -> Result<Vec<SandboxInfo>, CliError> {
    let started = match sandbox {
        Some(id) => {
            let request = ForkRequest {
                n: request.n,
                timeout_secs: request.timeout_secs,
                labels: request.labels,
                freeze: false,
            };
            client.fork(id, &request).await
        }
        None => client.spawn(&request).await,
    };
    started.map_err(failed)
}

/// Ends sandboxes. One that failed or expired is gone already, and one that cannot be ended now is deleted by the daemon
/// when its time is over.
pub async fn end(client: &Client, children: &[SandboxInfo]) {
    futures::stream::iter(children)
        .for_each_concurrent(PARALLEL, |child| async move {
            let _ = client.kill(&child.id).await;
        })
        .await;
}

/// Says so if a limit on memory was asked for and not every one of them has it.
pub fn warn_without_limit(wanted: Option<u64>, children: &[SandboxInfo], ui: &Ui) {
    let without = children
        .iter()
        .filter(|child| child.error.is_none() && child.memory_limit_mib.is_none())
        .count();
    if let (Some(wanted), 1..) = (wanted, without) {
        ui.talk(format_args!(
            "warning: {without} of {} have no limit of {wanted} MiB; the daemon's log says why it cannot set one",
            children.len()
        ));
    }
}
