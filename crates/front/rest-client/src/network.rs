//! Requests about the network of a sandbox.

use forkd_api::routes::{self, fill};
use forkd_api::{FlowEntry, FlowInfo, NetworkInfo, NetworkRequest, UpdateNetwork};
use reqwest::Method;

use crate::stream::Frames;
use crate::{Client, Error};

impl Client {
    /// Policy and counters of the network of a sandbox.
    pub async fn network(&self, id: &str) -> Result<NetworkInfo, Error> {
        self.json(self.get(&fill(routes::NETWORK, &[id]))).await
    }

    /// Replaces the network policy of a sandbox.
    pub async fn set_network(
        &self,
        id: &str,
        request: &NetworkRequest,
    ) -> Result<NetworkInfo, Error> {
        let route = fill(routes::NETWORK, &[id]);
        self.json(self.request(Method::PUT, &route).json(request))
            .await
    }

    /// Changes parts of the network policy of a sandbox.
    pub async fn edit_network(
        &self,
        id: &str,
        request: &UpdateNetwork,
    ) -> Result<NetworkInfo, Error> {
        let route = fill(routes::NETWORK, &[id]);
        self.json(self.request(Method::PATCH, &route).json(request))
            .await
    }

    /// Open flows of a sandbox.
    pub async fn network_flows(&self, id: &str) -> Result<Vec<FlowInfo>, Error> {
        self.json(self.get(&fill(routes::NETWORK_FLOWS, &[id])))
            .await
    }

    /// Denied and ended flows of a sandbox; with `follow` the stream ends with the sandbox.
    pub async fn network_log(&self, id: &str, follow: bool) -> Result<Frames<FlowEntry>, Error> {
        let mut path = fill(routes::NETWORK_LOG, &[id]);
        if follow {
            path.push_str("?follow=true");
        }
        Ok(Frames::new(self.send(self.get(&path)).await?))
    }

    /// Resets every connection of a sandbox.
    pub async fn reset_network(&self, id: &str) -> Result<(), Error> {
        self.nothing(self.request(Method::POST, &fill(routes::NETWORK_RESET, &[id])))
            .await
    }
}
