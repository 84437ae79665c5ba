//! `forkd-broker`: the one process that holds values of secrets.
//!
//! The engine `forkd-net` hands over connections of guests to hosts that have an injection: the stream of the guest and
//! a socket that is connected to the host. The broker ends TLS on both sides. It checks the certificate of the host for
//! the name of the rule, reads the requests of the guest, and puts the secret into one header.
//!
//! ```text
//!   program (control socket) ──► worker (one thread, one epoll) ──► flow ──► tls (both ends)
//!        └── vault (rules, values)                                   └── request (heads and lengths)
//! ```
//!
//! The process opens no socket and no file after its start. Every doubt is a refusal: a request goes out with its
//! secret, to the host of its rule, or not at all.

pub mod authority;
pub mod confine;
mod flow;
pub mod program;
pub mod request;
mod tls;
pub mod vault;
mod worker;
