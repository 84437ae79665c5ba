//! The hosts of a fleet.
//!
//! [`Members`] says which daemons there are: a fixed list, or those that hold a lease in etcd ([`etcd`]). [`placement`]
//! decides where new sandboxes go; it is a pure function of a [`View`]. Nothing here is asked or written for a single
//! sandbox: its ID names its host.

pub mod etcd;
mod members;
pub mod placement;
mod view;

pub use members::{Member, Members, MembersError};
pub use view::{NodeView, View};
