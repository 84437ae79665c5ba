//! The route that reports the memory, processor time and disk traffic of sandboxes.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use forkd_api::SandboxStats;

use forkd_edge::auth::Actor;
use forkd_edge::errors::Answer;
use forkd_sandboxes::app::App;
use forkd_sandboxes::process::{charges, usage};

/// Host resources that every live sandbox uses.
#[utoipa::path(get, path = "/v1/stats", tag = "sandboxes", responses(
    (status = 200, description = "One entry a sandbox, the oldest first", body = Vec<SandboxStats>)
))]
pub async fn stats(State(app): State<Arc<App>>, actor: Actor) -> Answer<Json<Vec<SandboxStats>>> {
    let all = app
        .blocking(move |app| {
            Ok(app
                .sandboxes
                .list()
                .iter()
                .map(|sandbox| sandbox.info())
                .filter(|info| actor.owns(Some(&info.owner)))
                .map(|info| {
                    let used = info.pid.map(usage).unwrap_or_default();
                    let charged = info.pid.map(charges).unwrap_or_default();
                    SandboxStats {
                        id: info.id,
                        snapshot_tag: info.snapshot_tag,
                        state: info.state,
                        created_at_unix: info.created_at_unix,
                        memory_mib: info.memory_mib,
                        own_bytes: used.own_bytes,
                        shared_bytes: used.shared_bytes,
                        cpu_us: used.cpu_us,
                        charged_bytes: charged.memory_bytes,
                        read_bytes: charged.read_bytes,
                        written_bytes: charged.written_bytes,
                    }
                })
                .collect())
        })
        .await?;
    Ok(Json(all))
}
