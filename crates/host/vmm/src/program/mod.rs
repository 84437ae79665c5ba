//! The program: options, the control loop, exit codes.

mod error;
mod log;
mod options;
pub mod seccomp;
mod session;

pub use error::{chain, wire_error};
pub use log::init as init_log;
pub use options::{Options, OptionsError, USAGE};
pub use session::{Session, SessionError};
