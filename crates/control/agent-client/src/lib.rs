//! Talks to the agent inside a guest, over any byte stream.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//!
//! use forkd_agent_client::{Client, Deadline, Options};
//! use forkd_guest_proto::ExecRequest;
//!
//! let client = Client::connect_vsock("/run/vm/vsock.sock".as_ref(), 1024, Options::default()).await?;
//! let request = ExecRequest { shell: Some("uname -r".into()), ..Default::default() };
//! let done = client.by(Deadline::within(Duration::from_secs(10))).exec_capture(request).await?;
//! println!("{}", String::from_utf8_lossy(&done.stdout));
//! # Ok(())
//! # }
//! ```
//!
//! A [`Client`] is a connection. It is cheap to clone and carries any number of requests at once. Requests are methods
//! of [`Calls`], which [`Client::by`] makes from a deadline. A request whose future or handle is dropped is cancelled.
//!
//! The guest is not trusted:
//! - a guest that does not answer meets the deadline of the call;
//! - a guest that sends more than its credit is cut off;
//! - answers are limited one by one, and all together by a [`Budget`];
//! - a guest that ends no cancelled request is cut off.
//!
//! A stream of output ([`Exec`], [`Eval`], [`Watch`], [`Dialled`]) must begin by the deadline and may then be silent:
//! it ends when its owner drops it. A transfer of a file must make progress within a minute.

mod archive;
mod budget;
mod calls;
mod connect;
mod connection;
mod deadline;
mod dial;
mod error;
mod eval;
mod exec;
mod files;
mod machine;
mod stream;
mod wall_clock;

use std::sync::Arc;

use forkd_guest_proto::Hello;

pub use archive::{Packing, Unpacking};
pub use budget::{Budget, Held};
pub use calls::Calls;
pub use connect::Options;
pub use deadline::Deadline;
pub use dial::{Dialled, DialledIo};
pub use error::{ConnectError, Error};
pub use eval::{Eval, EvalCapture};
pub use exec::{Captured, Exec, Input, Output, Stdin};
pub use files::{FileReader, FileWriter, Watch};
pub use forkd_guest_proto as proto;
pub use wall_clock::Identified;

use connection::Connection;

/// A connection to an agent. [`Self::by`] leads to the requests.
#[derive(Clone)]
pub struct Client {
    connection: Arc<Connection>,
}

impl Client {
    /// The agent's hello.
    #[must_use]
    pub fn hello(&self) -> &Hello {
        &self.connection.terms.peer
    }

    /// The connection has ended; a new one is needed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.connection.is_closed()
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.connection.terms.budget
    }

    /// Waits until the connection has ended.
    pub async fn closed(&self) {
        self.connection.closed().await;
    }

    /// Ends the connection; requests under way fail.
    pub fn close(&self) {
        self.connection.close("closed by this side");
    }
}
