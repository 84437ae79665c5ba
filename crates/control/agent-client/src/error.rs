//! Errors of connections and requests.

use forkd_guest_proto::{AgentError, ErrorCode};
use thiserror::Error;

/// A request failed.
#[derive(Debug, Error)]
pub enum Error {
    /// The connection ended before the answer.
    #[error("the connection to the agent ended: {reason}")]
    Closed { reason: String },
    /// The agent refused, or could not do it.
    #[error("the agent answered {}: {}", .0.code.name(), .0.message)]
    Agent(AgentError),
    /// The agent's answer makes no sense.
    #[error("the agent's answer cannot be read")]
    BadAnswer {
        #[source]
        source: serde_json::Error,
    },
    /// The request does not fit into a frame.
    #[error("a request of {size} bytes is too large")]
    TooLarge { size: usize },
    /// More came than the caller is ready to hold.
    #[error("the answer is larger than {limit} bytes")]
    OverLimit { limit: usize },
    /// The agent did not answer by the deadline of the call, or a transfer stood still for too long.
    #[error("the agent did not answer in time")]
    Timeout,
    /// The answers of all guests together take more memory than they may.
    #[error("answers of guests already hold the {limit} bytes that they may take together")]
    OverBudget { limit: usize },
    /// A listing is longer than was asked for.
    #[error("the agent sent more than the {limit} entries it was asked for")]
    TooMany {
        /// How many it was asked for.
        limit: u64,
    },
    /// The near end of a transfer failed.
    #[error("cannot {action} on this side")]
    Local {
        /// The address or the action.
        action: &'static str,
        /// Why it failed.
        #[source]
        source: std::io::Error,
    },
}

impl Error {
    /// The agent's code, if the agent answered.
    #[must_use]
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Agent(error) => Some(error.code),
            _ => None,
        }
    }
}

/// No connection came about.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// The socket could not be reached.
    #[error("cannot connect to {target}")]
    Socket {
        /// The address or the action.
        target: String,
        /// Why it failed.
        #[source]
        source: std::io::Error,
    },
    /// The VMM did not let us through to the port.
    #[error("the VMM refused a connection to port {port}: {answer:?}")]
    Refused {
        port: u32,
        /// The VMM's answer.
        answer: String,
    },
    /// The agent did not say hello.
    #[error("the agent did not say hello: {reason}")]
    NoHello {
        /// The event in its place.
        reason: String,
    },
    /// The agent speaks another version.
    #[error("the agent speaks version {theirs} of the protocol, not {ours}")]
    Version { theirs: u32, ours: u32 },
}
