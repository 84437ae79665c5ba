//! How long a VMM may take for a command.
//!
//! The owner of a sandbox waits for each command of [`super::owner::SandboxOwner::call`], and a cut holds a place among
//! those under way. A VMM that passes the deadline is killed: the daemon cannot know which layers such a VMM uses, so
//! its sandbox has failed. The deadlines are therefore generous. A host with an emulated CPU is thirty times slower.

use std::time::Duration;

use forkd_vmm_proto::Command;

use crate::state::SandboxRecord;

/// Limits on CPU or disk slow the VMM down: all times are multiplied by this number.
const LIMITED: u32 = 4;

/// The deadline of a command. A command that reads or writes memory gets `unit` again for each GiB of guest memory.
pub(super) fn of(command: &Command, record: &SandboxRecord, unit: Duration) -> Duration {
    let memory_mib = match command {
        Command::Cut(_) | Command::Checkpoint(_) | Command::Rollback(_) => record.memory_mib,
        _ => 0,
    };
    let limits = &record.limits;
    let limited = limits.cpu_millis.is_some()
        || limits.io_bytes_per_sec.is_some()
        || limits.io_ops_per_sec.is_some();
    let whole = unit + unit * memory_mib / 1024;
    if limited { whole * LIMITED } else { whole }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_limits_add_time() {
        let minute = Duration::from_secs(60);
        let mut record = SandboxRecord::unreadable("sb-1".parse().unwrap());
        record.memory_mib = 4096;
        let cut = Command::Rollback(forkd_vmm_proto::RollbackSpec {
            to: 1,
            new_layers: Vec::new(),
            generation: [0; 16],
        });
        assert_eq!(of(&Command::Resume, &record, minute), minute);
        assert_eq!(of(&cut, &record, minute), 5 * minute);
        record.limits.cpu_millis = Some(100);
        assert_eq!(of(&cut, &record, minute), 20 * minute);
        record.memory_mib = u32::MAX;
        record.limits.cpu_millis = None;
        assert!(of(&cut, &record, minute) > minute);
    }
}
