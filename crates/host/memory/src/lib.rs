//! Guest RAM: where it lies, what is mapped into it, what has changed, and how it is written out.
//!
//! A VM's memory is one range of reserved address space. A boot maps fresh zero pages over it, a restore
//! maps the layers of an image over it, private and copy-on-write. So the pages that differ from the
//! image are the ones the kernel made anonymous, and no dirty log has to run to know them.

mod changes;
mod early;
mod layout;
mod page_set;
mod plan;
mod ram;
mod working_set;
mod writer;

pub use early::EarlyCopy;
pub use layout::{HIGH_RAM_START, LOW_RAM_END, PAGE_SIZE, RamLayout, RamRegion};
pub use page_set::PageSet;
pub use plan::{WritePlan, plan_changed, plan_full, plan_onto};
pub use ram::{GuestRam, ImageLayers, MemoryError};
pub use working_set::{WorkingSet, WorkingSetError};
pub use writer::{WriteOutcome, WriteReport, Written};

/// Guest memory as it is read and written by address.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;
