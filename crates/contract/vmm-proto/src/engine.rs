//! The abilities of a VM engine.
//!
//! The controller offers an operation only if the engine of the VM announced the ability for it in its hello.

use std::fmt;

use crate::flags::{Flag, FlagSet};

/// An ability that a VM engine may lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Capability {
    /// A running VM can be cut and goes on while its memory is written ([`crate::Command::Cut`] with `resume`).
    LiveCut,
    /// A VM can keep checkpoints of itself ([`crate::Command::Checkpoint`]).
    Checkpoint,
    /// A VM can return to a checkpoint in place ([`crate::Command::Rollback`]).
    Rollback,
    /// A shell can be prepared before it is known what fills it.
    PooledShells,
    /// A restore can fault in a recorded working set ([`crate::RestoreSpec::prefault`]).
    Prefault,
    /// Guest memory can come from several layers and a page map, and a cut can hold changed pages only.
    LayeredMemory,
    /// The back end of the network device of a running VM can be exchanged.
    SetNet,
}

/// The abilities of an engine.
pub type Capabilities = FlagSet<Capability>;

impl Flag for Capability {
    const ALL: &'static [Self] = &[
        Self::LiveCut,
        Self::Checkpoint,
        Self::Rollback,
        Self::PooledShells,
        Self::Prefault,
        Self::LayeredMemory,
        Self::SetNet,
    ];

    fn bit(self) -> u8 {
        match self {
            Self::LiveCut => 0,
            Self::Checkpoint => 1,
            Self::Rollback => 2,
            Self::PooledShells => 3,
            Self::Prefault => 4,
            Self::LayeredMemory => 5,
            Self::SetNet => 6,
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LiveCut => "cutting a running VM",
            Self::Checkpoint => "checkpoints",
            Self::Rollback => "roll-back",
            Self::PooledShells => "pooled shells",
            Self::Prefault => "prefaulting a working set",
            Self::LayeredMemory => "layered memory",
            Self::SetNet => "exchanging the network back end",
        })
    }
}
