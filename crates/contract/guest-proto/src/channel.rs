//! The numbered byte channels of a stream.

/// Towards the agent: standard input, file content to write, code to evaluate.
pub const IN: u8 = 0;
/// Towards the host: standard output; also everything a pty prints, and what a dialled peer says.
pub const OUT: u8 = 1;
/// Towards the host: standard error.
pub const ERR: u8 = 2;
/// Towards the host: file content, and results too large for a response.
pub const BULK: u8 = 3;
/// The channel whose credit event frames use. No data frame carries this number.
pub const EVENTS: u8 = 4;
/// How many channels there are.
pub const COUNT: usize = 5;
