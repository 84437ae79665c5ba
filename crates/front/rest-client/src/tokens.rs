//! Requests about tokens.

use forkd_api::routes::{self, fill};
use forkd_api::{CreateToken, CreatedToken, TokenInfo};
use reqwest::Method;

use crate::{Client, Error};

impl Client {
    /// Every token, without its secret.
    pub async fn tokens(&self) -> Result<Vec<TokenInfo>, Error> {
        self.json(self.get(routes::TOKENS)).await
    }

    /// Makes a token. The answer is the only place that has the secret.
    pub async fn create_token(&self, request: &CreateToken) -> Result<CreatedToken, Error> {
        self.json(self.post(routes::TOKENS, request)).await
    }

    /// Revokes a token.
    pub async fn revoke_token(&self, name: &str) -> Result<(), Error> {
        self.nothing(self.request(Method::DELETE, &fill(routes::TOKEN, &[name])))
            .await
    }
}
