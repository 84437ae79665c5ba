//! [`Frozen`]: the files of a cut, from which children start.

use std::path::PathBuf;

use forkd_vmm_proto::{CutReport, Shape};

use crate::Disk;

/// The files that children start from. They exist as long as the kit.
#[derive(Debug, Clone)]
pub struct Frozen {
    /// The shape of the shells that can restore it.
    pub shape: Shape,
    /// vCPU and device state.
    pub state: PathBuf,
    /// The memory layers below the cut, oldest first. Empty for a full cut.
    pub below: Vec<PathBuf>,
    /// The memory layer of the cut.
    pub memory: PathBuf,
    /// The page index, for an incremental cut.
    pub index: Option<PathBuf>,
    /// The disks with the layers of the cut.
    pub disks: Vec<Disk>,
    /// The VMM's report about the cut.
    pub report: CutReport,
}

impl Frozen {
    /// All memory layers, oldest first.
    pub fn layers(&self) -> Vec<PathBuf> {
        let mut layers = self.below.clone();
        layers.push(self.memory.clone());
        layers
    }

    /// Removes the files of the cut. Running children have them open.
    pub fn remove(self) -> std::io::Result<()> {
        std::fs::remove_file(&self.state)?;
        std::fs::remove_file(&self.memory)?;
        self.index.map_or(Ok(()), std::fs::remove_file)
    }
}
