//! Live sandboxes.
//!
//! One task ([`owner`]) owns each sandbox's VM. Requests that change it (branch, pause, stop) go through
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
pub mod handle;
#[cfg(test)]
mod hold_tests;
pub mod identity;
mod layers;
pub mod owner;
mod registry;
pub mod state;

pub use branch::{BranchAsk, BranchDone, CutMode};
pub use checkpoint::{CheckpointAsk, info as checkpoint_info};
pub use handle::Sandbox;
pub use owner::Ask;
pub use registry::Registry;
pub use state::{Phase, Step};
