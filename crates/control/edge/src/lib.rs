//! The front door of the daemon: everything between a socket and a plane.
//!
//! A request crosses [`listen`] (socket, TLS, deadlines) and [`gate`] (who asks, how often, audit, trace) before a plane
//! sees it. [`errors`] is the one place that knows which error code is which status of HTTP.

pub mod activation;
pub mod audit;
pub mod auth;
pub mod config;
pub mod errors;
pub mod extract;
pub mod gate;
pub mod idempotency;
pub mod listen;
pub mod metrics;
pub mod origin;
pub mod rate;
pub mod stream;
pub mod telemetry;
pub mod tokens;
