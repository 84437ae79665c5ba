//! Talks to the agent inside a guest, over any byte stream.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use forkd_agent_client::{Client, Options};
//! use forkd_guest_proto::ExecRequest;
//!
//! let client = Client::connect_vsock("/run/vm/vsock.sock".as_ref(), 1024, Options::default()).await?;
//! let done = client.exec_capture(ExecRequest { shell: Some("uname -r".into()), ..Default::default() }).await?;
//! println!("{}", String::from_utf8_lossy(&done.stdout));
//! # Ok(())
//! # }
//! ```
//!
//! A [`Client`] is cheap to clone and carries any number of requests at once. A request whose handle is
//! dropped is cancelled. The guest is not trusted: what it sends is held only as far as its credit goes, and
//! a guest that overdraws it is cut off.

mod connect;
mod connection;
mod dial;
mod error;
mod eval;
mod exec;
mod files;
mod machine;
mod stream;
mod wall_clock;

use std::sync::Arc;

use forkd_guest_proto::{Hello, Request};
use serde::de::DeserializeOwned;

pub use connect::Options;
pub use dial::Dialled;
pub use error::{ConnectError, Error};
pub use eval::{Eval, EvalCapture};
pub use exec::{Captured, Exec, Output, Stdin};
pub use files::{FileReader, FileWriter, Watch};
pub use forkd_guest_proto as proto;
pub use wall_clock::Identified;

use connection::Connection;
use stream::Stream;

/// A connection to an agent.
#[derive(Clone)]
pub struct Client {
    connection: Arc<Connection>,
}

impl Client {
    /// What the agent said about itself.
    #[must_use]
    pub fn hello(&self) -> &Hello {
        &self.connection.peer
    }

    /// The connection has ended; a new one is needed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.connection.is_closed()
    }

    /// Waits until the connection has ended.
    pub async fn closed(&self) {
        self.connection.closed().await;
    }

    /// Ends the connection; requests under way fail.
    pub fn close(&self) {
        self.connection.close("closed by this side");
    }

    fn open(&self, request: &Request) -> Result<Stream, Error> {
        Stream::open(&self.connection, request)
    }

    /// Sends a request that has no bulk bytes and waits for its answer.
    async fn call<T: DeserializeOwned>(&self, request: &Request) -> Result<T, Error> {
        self.open(request)?.response().await
    }
}
