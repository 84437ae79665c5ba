//! Ports of guests.
//!
//! | module | content |
//! |---|---|
//! | `dial` | connections to a port, through the agent |
//! | `published` | host ports that lead to a port of a guest |
//! | `listening` | the ports on which programs of a guest listen |
//!
//! The agent connects inside the guest, so servers on 127.0.0.1 are reached and the guest needs no network. A connection
//! belongs to one *era* of its sandbox: the time between two roll-backs. A roll-back breaks every connection of the era
//! before it, because the program at the other end has gone back to a state in which the connection did not exist.

mod dial;
pub mod listening;
mod published;

pub use dial::{dial, relay};
pub use published::{Listener, Published, bind};
