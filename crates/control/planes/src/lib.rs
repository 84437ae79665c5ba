//! The APIs that the daemon serves.
//!
//! A plane translates: requests into operations of `forkd-sandboxes`, results and errors into responses. Each plane has
//! its own routes and its own form of errors; none takes a decision about a sandbox.

pub mod e2b;
pub mod guest;
pub mod ports;
pub mod rest;
