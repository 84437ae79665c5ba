//! Requests about secrets.

use forkd_api::routes::{self, fill};
use forkd_api::{PutSecret, SecretInfo};
use reqwest::Method;

use crate::{Client, Error};

impl Client {
    /// The secrets of the caller, without their values.
    pub async fn secrets(&self) -> Result<Vec<SecretInfo>, Error> {
        self.json(self.get(routes::SECRETS)).await
    }

    /// Sets the value of a secret, new or not.
    pub async fn set_secret(&self, name: &str, value: &PutSecret) -> Result<SecretInfo, Error> {
        let request = self.request(Method::PUT, &fill(routes::SECRET, &[name]));
        self.json(request.json(value)).await
    }

    /// Deletes a secret.
    pub async fn delete_secret(&self, name: &str) -> Result<(), Error> {
        self.nothing(self.request(Method::DELETE, &fill(routes::SECRET, &[name])))
            .await
    }
}
