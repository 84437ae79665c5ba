//! Model-specific registers: what a fresh CPU gets, and in which order saved ones come back.

use kvm_bindings::kvm_msr_entry;

/// Time stamp counter.
pub const TSC: u32 = 0x10;
/// The next timer interrupt, as a value of the time stamp counter.
pub const TSC_DEADLINE: u32 = 0x6e0;

/// Debugging features, among them branch records.
pub const DEBUGCTL: u32 = 0x1d9;
const MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
const MTRR_DEFAULT_TYPE: u32 = 0x2ff;
const MTRR_ENABLED_WRITE_BACK: u64 = 1 << 11 | 6;

fn entry(index: u32, data: u64) -> kvm_msr_entry {
    kvm_msr_entry {
        index,
        data,
        ..kvm_msr_entry::default()
    }
}

/// What a CPU starts with, where it is not zero. Not every host has all of them.
pub fn boot_msrs() -> Vec<kvm_msr_entry> {
    vec![
        entry(MISC_ENABLE, MISC_ENABLE_FAST_STRING),
        entry(MTRR_DEFAULT_TYPE, MTRR_ENABLED_WRITE_BACK),
    ]
}

/// Puts saved registers into the order in which they can be set: the counter before the deadline that is
/// relative to it, and everything else between.
pub fn restore_order(msrs: &mut [kvm_msr_entry]) {
    msrs.sort_by_key(|msr| match msr.index {
        TSC => 0,
        TSC_DEADLINE => 2,
        _ => 1,
    });
}

/// A deadline of zero means that the timer has fired, perhaps without its interrupt having reached the
/// guest yet. Makes it fire at once instead: one timer interrupt too many does no harm, one too few
/// stops a tickless guest.
pub fn revive_deadline(msrs: &mut [kvm_msr_entry]) {
    let Some(now) = msrs.iter().find(|m| m.index == TSC).map(|m| m.data) else {
        return;
    };
    for msr in msrs.iter_mut().filter(|m| m.index == TSC_DEADLINE) {
        if msr.data == 0 {
            msr.data = now.max(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deadline_comes_last_and_is_never_lost() {
        let mut msrs = vec![entry(TSC_DEADLINE, 0), entry(0x174, 3), entry(TSC, 99)];
        revive_deadline(&mut msrs);
        restore_order(&mut msrs);
        let order: Vec<_> = msrs.iter().map(|m| (m.index, m.data)).collect();
        assert_eq!(order, [(TSC, 99), (0x174, 3), (TSC_DEADLINE, 99)]);
    }
}
