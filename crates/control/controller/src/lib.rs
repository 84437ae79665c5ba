//! The daemon that owns every sandbox and snapshot of a host.
//!
//! A request crosses it in this order: [`listen`] (socket, TLS) → [`http`] (parse, token, log) → an
//! operation ([`sandbox`], [`build`], [`snapshots`], [`branching`], [`workspaces`]) → [`launch`] (processes and
//! their files), [`db`] (what survives a restart) and the store.

mod activation;
pub mod admission;
pub mod agent_limits;
pub mod app;
pub mod args;
pub mod audit;
pub mod auth;
pub mod branching;
pub mod build;
pub mod clock;
mod compact;
pub mod config;
pub mod db;
pub mod error;
pub mod events;
pub mod forking;
pub mod health;
pub mod http;
pub mod launch;
pub mod listen;
pub mod metrics;
mod process;
pub mod sandbox;
pub mod serve;
pub mod snapshots;
pub mod telemetry;
pub mod touched;
pub mod workspaces;
pub mod writing;
