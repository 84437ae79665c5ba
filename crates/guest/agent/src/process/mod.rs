//! Processes: started, followed, signalled, reaped.

mod defaults;
mod follow;
mod log;
pub mod pump;
mod reaper;
pub mod spawn;
mod supervise;
mod table;
pub mod users;

pub use follow::{attach, exec, input, start, wait};
pub use log::{Follower, Log, Read};
pub use pump::Gone;
pub use reaper::Reaper;
pub use table::{Process, Processes};
