//! Limits and walls around one VM on its host.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::flags::{Flag, FlagSet};

/// The most block devices that one VM can have limits for.
pub const MAX_IO_LIMITS: usize = 8;

/// The largest value of [`Limits::cpu_weight`].
pub const MAX_CPU_WEIGHT: u16 = 10_000;

/// Limits on the processes of one VM: its VMM and the writers that the VMM forks. A missing value is no limit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Host memory in bytes. Swap is not used on top of it.
    pub memory_bytes: Option<u64>,
    /// CPU time in thousandths of one CPU: 1500 is one and a half CPUs.
    pub cpu_millis: Option<u32>,
    /// Share of CPU time under contention, 1 to [`MAX_CPU_WEIGHT`]; the kernel's default is 100.
    pub cpu_weight: Option<u16>,
    /// Limits per block device, at most [`MAX_IO_LIMITS`].
    pub io: Vec<IoLimit>,
    /// Processes and threads. Without a value `forkd-spawn` sets the number that a VMM of the shape needs.
    pub pids: Option<u32>,
}

/// Limits on the use of one block device. A missing value is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoLimit {
    /// Major number of the device.
    pub major: u32,
    /// Minor number of the device.
    pub minor: u32,
    /// Bytes read per second.
    pub read_bytes: Option<u64>,
    /// Bytes written per second.
    pub write_bytes: Option<u64>,
    /// Read operations per second.
    pub read_ops: Option<u64>,
    /// Write operations per second.
    pub write_ops: Option<u64>,
}

impl Limits {
    /// The walls without which these limits cannot be kept.
    pub fn walls(&self) -> Walls {
        let mut walls = Walls::empty();
        let mut need = |asked: bool, wall| {
            if asked {
                walls.insert(wall);
            }
        };
        need(self.memory_bytes.is_some(), Wall::Memory);
        need(
            self.cpu_millis.is_some() || self.cpu_weight.is_some(),
            Wall::Cpu,
        );
        need(!self.io.is_empty(), Wall::Io);
        need(self.pids.is_some(), Wall::Pids);
        walls
    }
}

/// A wall between a VM and its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Wall {
    /// Every VM has a cgroup of its own, which is killed as a whole.
    Cgroup,
    /// Host memory can be limited.
    Memory,
    /// CPU time can be limited.
    Cpu,
    /// Use of block devices can be limited.
    Io,
    /// The number of processes is limited.
    Pids,
    /// The VMM is in namespaces of its own: mounts, processes, network, IPC and host name.
    Namespaces,
    /// The VMM has a user ID of its own. (It has no capabilities in any case.)
    User,
    /// Landlock denies the VMM every path.
    Landlock,
}

/// A wall that does not stand on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingWall {
    /// The name of the wall, see [`Wall::name`].
    pub wall: String,
    /// Why it does not stand.
    pub reason: String,
}

impl Wall {
    /// The name in the API and on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cgroup => "cgroup",
            Self::Memory => "memory",
            Self::Cpu => "cpu",
            Self::Io => "io",
            Self::Pids => "pids",
            Self::Namespaces => "namespaces",
            Self::User => "user",
            Self::Landlock => "landlock",
        }
    }
}

/// A set of walls.
pub type Walls = FlagSet<Wall>;

/// The jail that a VM has to be in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Jail {
    /// Refuse the VM if one of these walls does not stand.
    pub required: Walls,
}

impl Flag for Wall {
    const ALL: &'static [Self] = &[
        Self::Cgroup,
        Self::Memory,
        Self::Cpu,
        Self::Io,
        Self::Pids,
        Self::Namespaces,
        Self::User,
        Self::Landlock,
    ];

    fn bit(self) -> u8 {
        match self {
            Self::Cgroup => 0,
            Self::Memory => 1,
            Self::Cpu => 2,
            Self::Io => 3,
            Self::Pids => 4,
            Self::Namespaces => 5,
            Self::User => 6,
            Self::Landlock => 7,
        }
    }
}

impl fmt::Display for Wall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cgroup => "a cgroup per VM",
            Self::Memory => "the memory limit",
            Self::Cpu => "the CPU limit",
            Self::Io => "the disk limit",
            Self::Pids => "the process limit",
            Self::Namespaces => "namespaces",
            Self::User => "a user per VM",
            Self::Landlock => "Landlock",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_name_the_walls_they_need() {
        assert_eq!(Limits::default().walls(), Walls::empty());
        let limits = Limits {
            memory_bytes: Some(1),
            cpu_weight: Some(1),
            ..Limits::default()
        };
        let walls: Vec<Wall> = limits.walls().iter().collect();
        assert_eq!(walls, [Wall::Memory, Wall::Cpu]);
    }

    #[test]
    fn every_wall_has_a_bit_of_its_own() {
        let bits: std::collections::BTreeSet<u8> =
            Wall::ALL.iter().map(|wall| wall.bit()).collect();
        assert_eq!(bits.len(), Wall::ALL.len());
    }
}
