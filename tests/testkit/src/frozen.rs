//! A machine cut at one instant.

use std::path::PathBuf;

use forkd_vmm_proto::{CutReport, Shape};

use crate::Disk;

/// Everything children start from. The files live as long as the kit.
#[derive(Debug, Clone)]
pub struct Frozen {
    /// What shells must look like.
    pub shape: Shape,
    /// vCPU and device state.
    pub state: PathBuf,
    /// Memory.
    pub memory: PathBuf,
    /// Disks whose layers all belong to the cut.
    pub disks: Vec<Disk>,
    /// The machine has a network device.
    pub net: bool,
    /// What the VMM said about the cut.
    pub report: CutReport,
}
