//! Model-specific registers: the boot values, which ones a snapshot holds, and the order of a restore.

use std::ops::RangeInclusive;

use kvm_bindings::kvm_msr_entry;

/// Time stamp counter.
pub const TSC: u32 = 0x10;
/// The next timer interrupt, as a value of the time stamp counter.
pub const TSC_DEADLINE: u32 = 0x6e0;

/// Long mode, NX and, where a guest may have it, nested virtualisation.
pub const EFER: u32 = 0xc000_0080;
/// Enables VMX and SGX until it is locked.
pub const FEATURE_CONTROL: u32 = 0x3a;
/// Firmware and Linux set the lock whether or not there is anything to enable.
pub const FEATURE_CONTROL_LOCKED: u64 = 1;

/// Registers of features that [`super::cpuid`] hides. A snapshot neither holds nor sets them.
const HIDDEN: &[RangeInclusive<u32>] = &[
    // keys of enclaves
    0x8c..=0x8f,
    // performance counters
    0xc1..=0xc8,
    0x186..=0x18d,
    0x309..=0x30c,
    0x345..=0x345,
    0x38d..=0x390,
    0x3f1..=0x3f2,
    0x4c1..=0x4c8,
    0x600..=0x600,
    0xc000_0300..=0xc000_0303,
    0xc001_0000..=0xc001_0007,
    0xc001_0200..=0xc001_020b,
    // AMX
    0x1c4..=0x1c5,
    // VMX
    0x480..=0x4a0,
    // processor trace
    0x560..=0x587,
    // shadow stacks
    0x6a0..=0x6a8,
    // architectural branch records
    0x14ce..=0x14cf,
    // Hyper-V
    0x4000_0000..=0x4000_ffff,
    // asynchronous page faults and migration control of KVM
    0x4b56_4d02..=0x4b56_4d02,
    0x4b56_4d06..=0x4b56_4d08,
    // SVM and SEV
    0xc001_0114..=0xc001_0117,
    0xc001_0130..=0xc001_0132,
];

/// Whether a snapshot may hold the register.
pub fn is_saved(index: u32) -> bool {
    !HIDDEN.iter().any(|range| range.contains(&index))
}

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

/// Boot values that are not zero. Not every host has all of these registers.
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

/// Replaces a TSC deadline of zero by the current counter, so that the timer fires at once. Zero means that
/// the timer fired, perhaps without its interrupt having reached the guest. A spurious timer interrupt is
/// harmless; a lost one stops a tickless guest.
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
