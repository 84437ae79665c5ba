//! Rust client of the REST API.
//!
//! [`Client`] has one method per route; [`Target`] is the address of the daemon; [`Error`] tells an answer of the daemon from
//! a failure to reach it. The client never retries.
//!
//! ```no_run
//! # async fn example() -> Result<(), forkd_rest_client::Error> {
//! use forkd_rest_client::{Client, Target};
//!
//! let client = Client::new(&"http://127.0.0.1:8889".parse()?, None)?;
//! let children = client.spawn(&forkd_api::CreateSandboxes {
//!     snapshot_tag: "py".into(),
//!     n: 3,
//!     ..Default::default()
//! }).await?;
//! for child in &children {
//!     println!("{}", client.eval(&child.id, "1 + 1").await?.result.unwrap_or_default());
//! }
//! # Ok(())
//! # }
//! ```

mod error;
mod guest;
mod hub;
mod images;
mod line;
mod network;
mod nodes;
mod ports;
mod sandboxes;
mod secrets;
mod snapshots;
mod stream;
mod target;
mod terminal;
mod tokens;
mod transport;

pub use error::Error;
pub use stream::Frames;
pub use target::{InvalidTarget, Target};
pub use terminal::{Terminal, TerminalEvent};
pub use transport::{Client, Inside};
