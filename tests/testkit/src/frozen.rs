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
    /// Memory that the cut builds on, oldest first; none if the cut is whole.
    pub below: Vec<PathBuf>,
    /// Memory that the cut wrote.
    pub memory: PathBuf,
    /// Which page lies where, if the cut builds on others.
    pub index: Option<PathBuf>,
    /// Disks whose layers all belong to the cut.
    pub disks: Vec<Disk>,
    /// What the VMM said about the cut.
    pub report: CutReport,
}

impl Frozen {
    /// All files that hold memory, oldest first.
    pub fn layers(&self) -> Vec<PathBuf> {
        let mut layers = self.below.clone();
        layers.push(self.memory.clone());
        layers
    }

    /// Removes the files that the cut wrote. Machines that were started from it have them open.
    pub fn remove(self) -> std::io::Result<()> {
        std::fs::remove_file(&self.state)?;
        std::fs::remove_file(&self.memory)?;
        self.index.map_or(Ok(()), std::fs::remove_file)
    }
}
