//! Tokens. The gate lets only administrators in.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use forkd_api::{CreateToken, CreatedToken, TokenInfo};

use super::errors::Answer;
use super::extract::Body;
use crate::app::App;

/// Every token, without its secret.
#[utoipa::path(get, path = "/v1/tokens", tag = "tokens", responses(
    (status = 200, description = "Every token, in the order of their names", body = Vec<TokenInfo>)
))]
pub async fn list(State(app): State<Arc<App>>) -> Answer<Json<Vec<TokenInfo>>> {
    Ok(Json(app.tokens.list().await?))
}

/// Makes a token. It works at once; its secret is shown only here.
#[utoipa::path(post, path = "/v1/tokens", tag = "tokens", request_body = CreateToken, responses(
    (status = 201, description = "The token", body = CreatedToken)
))]
pub async fn create(
    State(app): State<Arc<App>>,
    Body(request): Body<CreateToken>,
) -> Answer<(StatusCode, Json<CreatedToken>)> {
    Ok((StatusCode::CREATED, Json(app.tokens.create(request).await?)))
}

/// Revokes a token. The next request with it is refused.
#[utoipa::path(delete, path = "/v1/tokens/{name}", tag = "tokens",
    params(("name" = String, Path, description = "Its name")), responses(
    (status = 204, description = "It is revoked")
))]
pub async fn revoke(State(app): State<Arc<App>>, Path(name): Path<String>) -> Answer<StatusCode> {
    app.tokens.revoke(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}
