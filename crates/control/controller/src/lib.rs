//! The daemon: puts the front door (`forkd-edge`), the planes (`forkd-planes`) and the domain (`forkd-sandboxes`)
//! together, and runs them until it is told to stop.

pub mod args;
mod inside;
pub mod mcp;
pub mod netns;
pub mod program;
pub mod serve;
