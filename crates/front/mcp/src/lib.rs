//! The tools that forkd offers to models over the Model Context Protocol.
//!
//! [`Tools`] answers the requests of one client; it has the same tools on every transport. [`stdio::serve`] speaks to the
//! program that started this one, [`http::service`] answers requests to `/mcp` of a daemon. Both reach the daemon through
//! [`forkd_rest_client::Client`], so tokens, owners, limits and the audit log are those of the REST API.
//!
//! ```text
//! client ─ stdio ─▶ forkd mcp ─ HTTP or Unix socket ─▶ daemon
//! client ─ HTTP ──▶ /mcp of the daemon ─ in process ──▶ its own REST routes
//! ```
//!
//! One file of `tools/` has the tools of one subject. A tool is a type that implements [`tool::Tool`]: its name, its texts,
//! the types of input and output (their schemas are derived) and the function that runs it.

mod call;
mod clip;
mod completion;
pub mod http;
mod options;
mod prompts;
mod refusal;
mod resources;
mod server;
pub mod stdio;
mod tool;
mod tools;

pub use options::{Options, Selection, UnknownTools};
pub use server::Tools;
pub use tool::Set;
