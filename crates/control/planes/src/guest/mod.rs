//! Operations on a running guest that every plane offers: programs, processes, files.
//!
//! No HTTP here: arguments are checked values, results are values, and errors are those of `forkd-sandboxes`. Each call
//! that waits for the guest takes its deadline from `agent_limits` or from its caller.

pub mod archive;
pub mod exec;
pub mod files;
pub mod process;
