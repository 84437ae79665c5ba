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
pub mod birth;
mod checkpoint;
pub(crate) mod cut;
pub(crate) mod disk_budget;
mod freeze;
pub mod handle;
mod headroom;
#[cfg(test)]
mod hold_tests;
pub mod identity;
pub(crate) mod layers;
mod network;
pub mod owner;
mod ports;
mod registry;
mod rollback;
mod secrets;
mod source;
pub mod state;

pub use checkpoint::{CheckpointAsk, info as checkpoint_info};
pub use cut::{AboutParent, Caller, CutAsk, CutDone, CutMode, Destination};
pub use handle::SandboxHandle;
pub use network::NetworkChange;
pub use owner::{Ask, Changes};
pub use ports::PortChange;
pub use registry::Registry;
pub use source::SourceSnapshot;
pub use state::{Phase, Step};
