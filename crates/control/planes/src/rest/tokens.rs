//! Routes that create, list and revoke tokens. The gate admits administrators only.

use std::sync::Arc;

use axum::extract::Path;
use axum::http::StatusCode;
use axum::{Extension, Json};
use forkd_api::{CreateToken, CreatedToken, TokenInfo};

use forkd_edge::errors::Answer;
use forkd_edge::extract::Body;
use forkd_edge::tokens::Tokens;

/// Every token, without its secret.
#[utoipa::path(get, path = "/v1/tokens", tag = "tokens", responses(
    (status = 200, description = "Every token, in the order of their names", body = Vec<TokenInfo>)
))]
pub async fn list(Extension(tokens): Extension<Arc<Tokens>>) -> Answer<Json<Vec<TokenInfo>>> {
    Ok(Json(tokens.list().await?))
}

/// Makes a token. It works at once; its secret is shown only here.
#[utoipa::path(post, path = "/v1/tokens", tag = "tokens", request_body = CreateToken, responses(
    (status = 201, description = "The token", body = CreatedToken)
))]
pub async fn create(
    Extension(tokens): Extension<Arc<Tokens>>,
    Body(request): Body<CreateToken>,
) -> Answer<(StatusCode, Json<CreatedToken>)> {
    Ok((StatusCode::CREATED, Json(tokens.create(request).await?)))
}

/// Revokes a token. The next request with it is refused.
#[utoipa::path(delete, path = "/v1/tokens/{name}", tag = "tokens",
    params(("name" = String, Path, description = "Its name")), responses(
    (status = 204, description = "It is revoked")
))]
pub async fn revoke(
    Extension(tokens): Extension<Arc<Tokens>>,
    Path(name): Path<String>,
) -> Answer<StatusCode> {
    tokens.revoke(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}
