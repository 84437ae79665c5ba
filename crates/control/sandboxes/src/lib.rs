//! Sandboxes and snapshots of one host: the domain of the daemon, without HTTP.
//!
//! ```text
//!   planes (REST …) ──► ops ──► sandbox (one owner task each) ──► launch (VMM processes, their files)
//!                        │                 │
//!                        └── limits        └── state (database), store (content)
//! ```
//!
//! [`app::App`] is the daemon as one value. Every operation of [`ops`] takes it, a checked request, and returns a value of
//! `forkd-api` or an [`error::Error`] with a code; no type here knows a status of HTTP.

pub mod agent_limits;
pub mod app;
pub mod clock;
pub mod config;
pub mod error;
pub mod events;
pub mod health;
pub mod host_limits;
pub mod launch;
pub mod limits;
pub mod metrics;
pub mod netns;
pub mod node;
pub mod ops;
pub mod owners;
pub mod ports;
pub mod private;
pub mod process;
pub mod sandbox;
pub mod seal;
pub mod state;
pub mod touched;
pub mod trace;
