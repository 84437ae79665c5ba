//! `forkd-net`: the network of every sandbox of a host, without privileges.
//!
//! Each VMM exchanges Ethernet frames with the engine over a `SOCK_SEQPACKET` pair. The engine ends TCP and UDP of the
//! guest and opens an ordinary host socket for each flow that the policy allows. No packet of a guest reaches the IP
//! stack of the host.
//!
//! ```text
//!   program (control socket) ──► worker (one thread, one epoll) ──► sandbox ──► tcp | udp | dns
//!                                                                     │
//!                                          wire (frames)   policy (verdicts)   peek (first bytes)
//! ```
//!
//! A sandbox belongs to one worker for its whole life, so nothing is locked. A panic while the worker serves a sandbox
//! ends the network of that sandbox alone.

pub mod confine;
pub mod dns;
mod host_addresses;
mod limit;
mod log;
mod out;
pub mod peek;
pub mod policy;
pub mod program;
mod sandbox;
mod tcp;
mod udp;
pub mod wire;
mod worker;

pub use host_addresses::HostAddresses;
pub use sandbox::{After as SandboxState, Context, FRAMES, Notice, Sandbox};
