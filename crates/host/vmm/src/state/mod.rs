//! The state file: everything of a machine but its memory and disks.

mod container;
mod machine;

pub use container::{FORMAT_VERSION, MAX_STATE, Part, StateError, decode_parts, encode_parts};
pub use machine::{MachineState, SlotPart};
