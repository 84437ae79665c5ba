//! The client against servers of the test. One program: each would link the whole TLS stack.

mod tls;
mod unreachable;
