//! Routes for secrets. A value goes in and never comes out.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use forkd_api::{ErrorCode, PutSecret, SecretInfo};
use forkd_types::SecretName;

use forkd_edge::auth::Actor;
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::extract::Body;
use forkd_sandboxes::app::App;
use forkd_sandboxes::ops::secrets;
use forkd_sandboxes::state::StoredSecret;

fn shown(secret: StoredSecret) -> SecretInfo {
    SecretInfo {
        name: secret.name,
        created_at_unix: secret.created_at_unix,
        updated_at_unix: secret.updated_at_unix,
    }
}

fn name(text: &str) -> Result<SecretName, Failure> {
    let invalid = |error: forkd_types::InvalidSecretName| {
        Failure::new(ErrorCode::InvalidName, error.to_string())
    };
    text.parse().map_err(invalid)
}

/// The secrets of the caller, without their values.
#[utoipa::path(get, path = "/v1/secrets", tag = "secrets", responses(
    (status = 200, description = "The secrets, in the order of their names", body = Vec<SecretInfo>)
))]
pub async fn list(State(app): State<Arc<App>>, actor: Actor) -> Answer<Json<Vec<SecretInfo>>> {
    let all = secrets::list(&app, &actor.owner).await?;
    Ok(Json(all.into_iter().map(shown).collect()))
}

/// Sets the value of a secret, new or not. Requests of running sandboxes use it from the answer on.
#[utoipa::path(put, path = "/v1/secrets/{name}", tag = "secrets", request_body = PutSecret,
    params(("name" = String, Path, description = "Its name")), responses(
    (status = 200, description = "The value is stored and in use", body = SecretInfo)
))]
pub async fn put(
    State(app): State<Arc<App>>,
    actor: Actor,
    Path(text): Path<String>,
    Body(request): Body<PutSecret>,
) -> Answer<Json<SecretInfo>> {
    let stored = secrets::set(&app, &actor.owner, name(&text)?, request.value).await?;
    Ok(Json(shown(stored)))
}

/// Deletes a secret. Requests of sandboxes that need it are refused from the answer on.
#[utoipa::path(delete, path = "/v1/secrets/{name}", tag = "secrets",
    params(("name" = String, Path, description = "Its name")), responses(
    (status = 204, description = "It is gone")
))]
pub async fn remove(
    State(app): State<Arc<App>>,
    actor: Actor,
    Path(text): Path<String>,
) -> Answer<StatusCode> {
    secrets::delete(&app, &actor.owner, name(&text)?).await?;
    Ok(StatusCode::NO_CONTENT)
}
