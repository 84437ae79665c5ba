//! Requests about the ports of a sandbox, and connections to them.

use forkd_api::routes::{self, fill};
use forkd_api::{PortInfo, PortSettings, TCP_PROTOCOL};
use http::StatusCode;
use http::header::{CONNECTION, UPGRADE};
use reqwest::{Method, Upgraded};

use crate::{Client, Error};

impl Client {
    /// Ports on which programs of the guest listen, and ports that have settings.
    pub async fn ports(&self, id: &str) -> Result<Vec<PortInfo>, Error> {
        self.json(self.get(&fill(routes::PORTS, &[id]))).await
    }

    /// One port of the guest.
    pub async fn port(&self, id: &str, port: u16) -> Result<PortInfo, Error> {
        self.json(self.get(&one(routes::PORT, id, port))).await
    }

    /// Sets who may use a port, and its host port.
    pub async fn set_port(
        &self,
        id: &str,
        port: u16,
        settings: &PortSettings,
    ) -> Result<PortInfo, Error> {
        let route = one(routes::PORT, id, port);
        self.json(self.request(Method::PUT, &route).json(settings))
            .await
    }

    /// Forgets the settings of a port and closes its host port.
    pub async fn forget_port(&self, id: &str, port: u16) -> Result<(), Error> {
        self.nothing(self.request(Method::DELETE, &one(routes::PORT, id, port)))
            .await
    }

    /// A byte stream from and to a port of the guest.
    pub async fn connect_port(&self, id: &str, port: u16) -> Result<Upgraded, Error> {
        let request = self
            .upgrade(&one(routes::PORT_CONNECT, id, port))
            .header(CONNECTION, "Upgrade")
            .header(UPGRADE, TCP_PROTOCOL);
        let response = self.send(request).await?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(Error::CutOff(
                "the server did not open a byte stream".into(),
            ));
        }
        let upgraded = response.upgrade().await;
        upgraded.map_err(|error| Error::CutOff(Error::root(error)))
    }
}

fn one(route: &str, id: &str, port: u16) -> String {
    fill(route, &[id, &port.to_string()])
}
