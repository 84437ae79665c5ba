//! `forkd-gateway`: one address for a fleet of daemons.
//!
//! ```text
//!  client ──REST──▶ gateway ──REST──▶ daemon of the node that the sandbox ID names
//!                     │  └─every second─▶ /v1/node, /v1/snapshots, /v1/workspaces of each node
//!                     └─ a fixed list, or etcd: which daemons there are
//! ```
//!
//! [`route`] says what is to be done with a request, [`pass`] sends it on, [`create`] places new sandboxes, [`merge`] joins
//! lists and streams of all nodes, [`nodes`] keeps the view of the fleet. A gateway has no state of its own: any number of
//! them can run side by side, and one that is killed loses nothing.
//!
//! The gateway grants nothing. A request goes on with the token that the client sent, and the node decides.

mod args;
mod create;
mod merge;
mod nodes;
mod own;
mod pass;
mod program;
mod route;
mod serve;

pub use program::main;
