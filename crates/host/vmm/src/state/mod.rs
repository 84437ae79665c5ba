//! The state file: the whole machine without its memory and disks.
//!
//! `container` is the file format, `machine` the content. See `docs/decisions/0008-state-file.md`.

mod container;
mod machine;

pub use container::{FORMAT_VERSION, MAX_STATE, Part, StateError, decode_parts, encode_parts};
pub use machine::{MachineState, SlotPart};
