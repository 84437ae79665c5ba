//! The program: command line, control loop, log, system call filters and exit codes.

mod error;
mod log;
mod options;
pub mod seccomp;
pub mod self_test;
mod session;

pub use error::{chain, wire_error};
pub use log::init as init_log;
pub use options::{Options, OptionsError, USAGE};
pub use session::{Session, SessionError};
