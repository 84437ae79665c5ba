//! Live sandboxes.
//!
//! One task ([`driver`]) owns each sandbox's VM. Requests that change it (branch, pause, stop) go through
//! the sandbox's queue, which can say no; requests that only talk to the guest (exec, files) go to its
//! agent directly.
//!
//! ```text
//!                    ready                cut
//!   Launching ─────────────────► Running ◄────► Cutting
//!      │  │                      ▲  │ │            │
//!      │  │ stop          resume │  │ │ pause      │ stop, ended
//!      │  │                      │  │ ▼            │
//!      │  │                     Paused│            │
//!      │  └───────────┐           │   │            │
//!      │ failed       ▼           ▼   ▼            ▼
//!      └─────────► Failed ◄──── ended   Stopping ──► (gone)
//! ```

pub mod adopt;
mod branch;
mod checkpoint;
pub mod create;
mod driver;
mod entry;
pub mod freeze;
#[cfg(test)]
mod hold_tests;
mod identity;
mod layers;
mod registry;
mod state;

pub use branch::{BranchAsk, BranchDone, CutMode};
pub use checkpoint::{CheckpointAsk, info as checkpoint_info};
pub use driver::Ask;
pub use entry::Sandbox;
pub use registry::Registry;
pub use state::{Phase, Step};
