//! Requests about the hosts of a fleet.

use forkd_api::routes::{self, fill};
use forkd_api::{FleetNode, NodeInfo, UpdateNode};
use reqwest::Method;

use crate::{Client, Error};

impl Client {
    /// Describes the host of the daemon.
    pub async fn node(&self) -> Result<NodeInfo, Error> {
        self.json(self.get(routes::NODE)).await
    }

    /// Drains the host of the daemon, or ends a drain.
    pub async fn update_node(&self, request: &UpdateNode) -> Result<NodeInfo, Error> {
        self.json(self.request(Method::PATCH, routes::NODE).json(request))
            .await
    }

    /// Lists the hosts of a fleet. Only a gateway has this route.
    pub async fn nodes(&self) -> Result<Vec<FleetNode>, Error> {
        self.json(self.get(routes::NODES)).await
    }

    /// Drains a host of a fleet through its gateway, or ends a drain.
    pub async fn update_node_of(
        &self,
        name: &str,
        request: &UpdateNode,
    ) -> Result<NodeInfo, Error> {
        let route = fill(routes::FLEET_NODE, &[name]);
        self.json(self.request(Method::PATCH, &route).json(request))
            .await
    }
}
