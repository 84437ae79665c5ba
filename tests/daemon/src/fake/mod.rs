//! A VMM without KVM: the VMM protocol in front, an agent in memory behind.
//!
//! - `spawner` takes the place of `forkd-spawn` and starts VMMs as processes.
//! - [`Faults`] says what goes wrong, and at which [`Step`].
//! - `session` answers commands one after another.
//! - `vm` holds the guest, the vCPU gate and the agent's connections.
//! - `net` is the network device: it sends one segment and reports the answer of the engine.
//! - `memory` turns a guest into pages and back, so cuts write real layers and page maps.
//! - `agent` speaks the guest protocol on the vsock socket, `dial` connects to ports.
//!
//! Invariant: everything a guest knows is in its pages. A child that is restored from a cut knows exactly what the
//! source knew at the instant of the cut.

mod agent;
mod archive;
mod dial;
mod faults;
mod guest;
mod memory;
mod net;
mod session;
mod shell;
mod spawner;
mod vm;
mod volumes;

pub use faults::{Fault, Faults, Injected, Step};
pub use session::serve;
pub use spawner::spawn;
pub(crate) use spawner::{LIMITS, MISSING_WALLS};
