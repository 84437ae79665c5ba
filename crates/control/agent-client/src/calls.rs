//! Requests to an agent, all of them under a limit.

use std::time::Duration;

use forkd_guest_proto::Request;
use serde::de::DeserializeOwned;

use crate::deadline::{Deadline, Limit};
use crate::stream::Stream;
use crate::{Client, Error};

/// Requests to an agent. Each ends by its deadline, whatever the guest does.
#[derive(Clone)]
pub struct Calls {
    client: Client,
    limit: Limit,
}

impl std::ops::Deref for Calls {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Client {
    /// Requests that end by this deadline.
    #[must_use]
    pub fn by(&self, deadline: Deadline) -> Calls {
        Calls {
            client: self.clone(),
            limit: Limit::By(deadline),
        }
    }

    /// Requests that have this much time each.
    #[must_use]
    pub fn each_within(&self, time: Duration) -> Calls {
        Calls {
            client: self.clone(),
            limit: Limit::Each(time),
        }
    }
}

impl Calls {
    /// The deadline of a request that begins now.
    pub(crate) fn deadline(&self) -> Deadline {
        self.limit.deadline()
    }

    pub(crate) fn open(&self, request: &Request) -> Result<Stream, Error> {
        Stream::open(&self.client.connection, request)
    }

    /// Sends a request that has no bulk bytes and waits for its answer.
    pub(crate) async fn call<T: DeserializeOwned>(&self, request: &Request) -> Result<T, Error> {
        let stream = self.open(request)?;
        self.deadline().bound(stream.response()).await
    }
}
