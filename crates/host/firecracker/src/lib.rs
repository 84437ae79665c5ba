//! The engine `firecracker`: an adapter between the VM protocol and the HTTP API of an installed Firecracker.
//!
//! ```text
//!   daemon ──vmm-proto──► Session ──HTTP──► firecracker ◄──KVM──► guest
//!      │                     │ starts, jails     │
//!      └──vsock socket──► Relay ──vsock socket───┘
//! ```
//!
//! [`Session`] owns the VM: it translates each command and answers it. [`Api`] is a bounded HTTP client: Firecracker
//! holds a hostile guest, so nothing that it sends is trusted. [`Relay`] carries the bytes of guest connections.
//! [`FlatDisk`] turns a stack of disk layers into the plain file that Firecracker needs, and back into a layer.
//!
//! Firecracker opens paths. All of them are relative to the VM's own folder, which is the working directory of both
//! processes, so that the paths in a snapshot fit every child.

mod api;
mod console;
mod disk;
mod process;
mod relay;
mod session;

pub use api::{Api, ApiError};
pub use disk::{FlatDisk, FlatDiskError};
pub use process::{Firecracker, StartError};
pub use relay::{Relay, RelayNotice};
pub use session::{ENGINE_CAPABILITIES, Session, SessionError};
