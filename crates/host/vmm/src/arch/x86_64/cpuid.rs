//! The CPU that a guest is shown.
//!
//! [`for_vm`] starts from the features that KVM supports on this host, hides those that a snapshot cannot hold
//! or a microVM does not need (`HIDDEN`), reduces them to `BASELINE` for that model, and describes one
//! socket with a core per vCPU. [`for_vcpu`] fills in the number of a vCPU. [`super::cpu_check`] compares a
//! snapshot with the result.

use forkd_vmm_proto::CpuModel;
use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// One register of a leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

const HYPERVISOR: u32 = 1 << 31;
const TSC_DEADLINE_TIMER: u32 = 1 << 24;
const HYPER_THREADING: u32 = 1 << 28;

/// Bits that are never shown, because a snapshot does not hold their state or a microVM has no use for
/// them: nested virtualisation, performance counters, enclaves, tracing, shadow stacks, memory
/// protection extensions, AMX, and the asynchronous page faults of KVM, which would be in flight across a
/// cut.
const HIDDEN: &[(u32, u32, Register, u32)] = &[
    (
        1,
        0,
        Register::Ecx,
        1 << 5 | 1 << 6 | 1 << 3 | 1 << 15 | 1 << 2,
    ),
    (1, 0, Register::Edx, 1 << 21 | 1 << 22 | 1 << 29),
    (7, 0, Register::Ebx, 1 << 2 | 1 << 14 | 1 << 25),
    (7, 0, Register::Ecx, 1 << 7 | 1 << 5 | 1 << 30),
    (
        7,
        0,
        Register::Edx,
        1 << 20 | 1 << 22 | 1 << 24 | 1 << 25 | 1 << 19,
    ),
    (
        0x8000_0001,
        0,
        Register::Ecx,
        1 << 2 | 1 << 10 | 1 << 15 | 1 << 23 | 1 << 24 | 1 << 28,
    ),
    (0x4000_0001, 0, Register::Eax, 1 << 4 | 1 << 10 | 1 << 14),
];

/// Leaves that are never shown: monitor, counters, enclaves, tracing, AMX, SVM, SEV, counters,
/// and second descriptions of the topology.
const HIDDEN_LEAVES: &[u32] = &[
    0x5,
    0xa,
    0x12,
    0x14,
    0x1d,
    0x1e,
    0x1f,
    0x8000_000a,
    0x8000_001b,
    0x8000_001f,
    0x8000_0022,
    0x8000_0026,
];

/// The feature bits of the baseline model: x86-64-v2, the features that Linux and KVM need beside it, and
/// the controls of speculation that mitigations use. A register of value 0 here shows no feature.
const BASELINE: &[(u32, u32, Register, u32)] = &[
    // SSE3, SSSE3, CX16, SSE4.1, SSE4.2, x2APIC, POPCNT, TSC deadline, hypervisor
    (
        1,
        0,
        Register::Ecx,
        1 | 1 << 9 | 1 << 13 | 1 << 19 | 1 << 20 | 1 << 21 | 1 << 23 | 1 << 24 | 1 << 31,
    ),
    // FPU to SSE2, without what is hidden
    (1, 0, Register::Edx, 0x1783_fbff | HYPER_THREADING),
    // a timer that goes on in idle states; without it Linux looks for another one and finds none
    (6, 0, Register::Eax, 1 << 2),
    (7, 0, Register::Ebx, 0),
    (7, 0, Register::Ecx, 0),
    // MD_CLEAR, SPEC_CTRL, STIBP, SSBD. Not ARCH_CAPABILITIES: a guest that moves must assume that the
    // next host is vulnerable.
    (7, 0, Register::Edx, 1 << 10 | 1 << 26 | 1 << 27 | 1 << 31),
    (7, 1, Register::Eax, 0),
    (7, 1, Register::Ebx, 0),
    (7, 1, Register::Ecx, 0),
    (7, 1, Register::Edx, 0),
    (7, 2, Register::Edx, 0),
    (0xd, 0, Register::Eax, 0),
    (0xd, 1, Register::Eax, 0),
    // LAHF in long mode
    (0x8000_0001, 0, Register::Ecx, 1),
    // SYSCALL, NX, long mode, and AMD's repetition of leaf 1
    (
        0x8000_0001,
        0,
        Register::Edx,
        0x0183_f3ff | 1 << 11 | 1 << 20 | 1 << 29,
    ),
    // invariant TSC
    (0x8000_0007, 0, Register::Edx, 1 << 8),
    // IBPB, IBRS, STIBP, SSBD, VIRT_SSBD
    (
        0x8000_0008,
        0,
        Register::Ebx,
        1 << 12 | 1 << 14 | 1 << 15 | 1 << 24 | 1 << 25,
    ),
    (0x8000_0021, 0, Register::Eax, 0),
];

pub(super) fn register_mut(entry: &mut kvm_cpuid_entry2, register: Register) -> &mut u32 {
    match register {
        Register::Eax => &mut entry.eax,
        Register::Ebx => &mut entry.ebx,
        Register::Ecx => &mut entry.ecx,
        Register::Edx => &mut entry.edx,
    }
}

pub(super) fn find(
    entries: &[kvm_cpuid_entry2],
    leaf: u32,
    index: u32,
) -> Option<kvm_cpuid_entry2> {
    entries.iter().find(|e| is(e, leaf, index)).copied()
}

/// Whether an entry is the given leaf. Of a leaf without subleaves the index means nothing.
fn is(entry: &kvm_cpuid_entry2, leaf: u32, index: u32) -> bool {
    let has_subleaves = entry.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX != 0;
    entry.function == leaf && (entry.index == index || (!has_subleaves && index == 0))
}

/// The CPU of a whole VM, to be made each vCPU's own with [`for_vcpu`].
pub fn for_vm(
    supported: &[kvm_cpuid_entry2],
    model: CpuModel,
    vcpus: u8,
    has_tsc_deadline: bool,
) -> Vec<kvm_cpuid_entry2> {
    let mut entries: Vec<_> = supported
        .iter()
        .filter(|e| !HIDDEN_LEAVES.contains(&e.function))
        .copied()
        .collect();
    for entry in &mut entries {
        mask(entry, HIDDEN, |bits, hidden| bits & !hidden);
        if model == CpuModel::Baseline {
            mask(entry, BASELINE, |bits, shown| bits & shown);
        }
    }
    if model == CpuModel::Baseline {
        // Without XSAVE its description would only confuse.
        entries.retain(|e| e.function != 0xd);
    }
    for entry in entries.iter_mut().filter(|e| e.function == 1) {
        entry.ecx |= HYPERVISOR;
        if has_tsc_deadline {
            entry.ecx |= TSC_DEADLINE_TIMER;
        }
        if vcpus > 1 {
            entry.edx |= HYPER_THREADING;
        }
        entry.ebx = (entry.ebx & 0xffff) | u32::from(vcpus) << 16;
    }
    topology(&mut entries, vcpus);
    entries
}

fn mask(
    entry: &mut kvm_cpuid_entry2,
    table: &[(u32, u32, Register, u32)],
    apply: impl Fn(u32, u32) -> u32,
) {
    for &(leaf, index, register, bits) in table {
        if is(entry, leaf, index) {
            let place = register_mut(entry, register);
            *place = apply(*place, bits);
        }
    }
}

fn id_bits(vcpus: u8) -> u32 {
    u32::from(vcpus).next_power_of_two().trailing_zeros()
}

/// One socket, one thread a core, as many cores as vCPUs.
fn topology(entries: &mut Vec<kvm_cpuid_entry2>, vcpus: u8) {
    let last = u32::from(vcpus) - 1;
    for entry in entries.iter_mut() {
        match entry.function {
            // Intel's caches: the first two levels belong to a core, the third to all.
            4 if entry.eax & 0x1f != 0 => {
                let sharing = if (entry.eax >> 5) & 7 >= 3 { last } else { 0 };
                entry.eax = (entry.eax & 0x3fff) | sharing << 14 | last << 26;
            }
            0x8000_0008 => {
                entry.ecx = (entry.ecx & !0xf0ff) | last | id_bits(vcpus) << 12;
            }
            // AMD's caches.
            0x8000_001d if entry.eax & 0x1f != 0 => {
                let sharing = if (entry.eax >> 5) & 7 >= 3 { last } else { 0 };
                entry.eax = (entry.eax & 0x3fff) | sharing << 14;
            }
            _ => {}
        }
    }
    if !entries.iter().any(|e| e.function == 0xb) {
        return;
    }
    entries.retain(|e| e.function != 0xb);
    let level = |index: u32, eax: u32, ebx: u32, kind: u32| kvm_cpuid_entry2 {
        function: 0xb,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax,
        ebx,
        ecx: kind << 8 | index,
        ..kvm_cpuid_entry2::default()
    };
    entries.extend([
        level(0, 0, 1, 1),
        level(1, id_bits(vcpus), u32::from(vcpus), 2),
        level(2, 0, 0, 0),
    ]);
}

/// Gives a vCPU its own number.
pub fn for_vcpu(entries: &[kvm_cpuid_entry2], vcpu: u8) -> Vec<kvm_cpuid_entry2> {
    let id = u32::from(vcpu);
    let mut entries = entries.to_vec();
    for entry in &mut entries {
        match entry.function {
            1 => entry.ebx = (entry.ebx & 0x00ff_ffff) | id << 24,
            0xb => entry.edx = id,
            0x8000_001e => {
                entry.eax = id;
                entry.ebx = id;
                entry.ecx &= !0x7ff;
            }
            _ => {}
        }
    }
    entries
}

/// The vendor string of leaf 0; empty without one.
pub(super) fn vendor(entries: &[kvm_cpuid_entry2]) -> String {
    let Some(leaf) = find(entries, 0, 0) else {
        return String::new();
    };
    [leaf.ebx, leaf.edx, leaf.ecx]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .map(|byte| {
            if byte.is_ascii_graphic() {
                char::from(byte)
            } else {
                '?'
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32, regs: [u32; 4]) -> kvm_cpuid_entry2 {
        let [eax, ebx, ecx, edx] = regs;
        kvm_cpuid_entry2 {
            function,
            index,
            eax,
            ebx,
            ecx,
            edx,
            ..kvm_cpuid_entry2::default()
        }
    }

    fn host() -> Vec<kvm_cpuid_entry2> {
        vec![
            entry(0, 0, [0xd, 0x6874_7541, 0x444d_4163, 0x6974_6e65]),
            entry(1, 0, [0, 0, !HYPERVISOR, u32::MAX]),
            entry(7, 0, [0, u32::MAX, u32::MAX, u32::MAX]),
            entry(6, 0, [4, 0, 0, 0]),
            entry(0xa, 0, [1, 1, 1, 1]),
            entry(0xb, 0, [0, 0, 0, 0]),
            entry(0xd, 1, [0xf, 0, 0, 0]),
            entry(0x8000_0001, 0, [0, 0, u32::MAX, u32::MAX]),
            entry(0x8000_0008, 0, [0x3030, u32::MAX, 0, 0]),
            entry(0x8000_001e, 0, [0, 0, 0, 0]),
        ]
    }

    #[test]
    fn every_vcpu_has_its_own_number() {
        let vm = for_vm(&host(), CpuModel::Host, 4, true);
        let cpu = for_vcpu(&vm, 3);
        assert_eq!(find(&cpu, 1, 0).unwrap().ebx >> 16, 0x0304);
        assert_eq!(find(&cpu, 0xb, 1).unwrap().edx, 3);
        assert_eq!(find(&cpu, 0xb, 1).unwrap().eax, 2);
        assert_eq!(find(&cpu, 0x8000_0008, 0).unwrap().ecx, 2 << 12 | 3);
        assert_eq!(find(&cpu, 0x8000_001e, 0).unwrap().eax, 3);
    }

    #[test]
    fn nested_virtualisation_and_counters_are_hidden() {
        let vm = for_vm(&host(), CpuModel::Host, 1, true);
        assert_eq!(find(&vm, 1, 0).unwrap().ecx & (1 << 5), 0);
        assert_eq!(find(&vm, 0x8000_0001, 0).unwrap().ecx & (1 << 2), 0);
        assert!(find(&vm, 0xa, 0).is_none());
    }

    #[test]
    fn the_baseline_has_no_avx_but_what_v2_needs() {
        let vm = for_vm(&host(), CpuModel::Baseline, 1, true);
        assert_eq!(
            find(&vm, 6, 0).unwrap().eax,
            4,
            "the timer must go on when idle"
        );
        let ecx = find(&vm, 1, 0).unwrap().ecx;
        assert_eq!(ecx & (1 << 28 | 1 << 26), 0);
        assert_ne!(ecx & (1 << 23), 0);
        assert_eq!(find(&vm, 7, 0).unwrap().ebx, 0);
        assert!(find(&vm, 0xd, 1).is_none());
    }

    #[test]
    fn the_baseline_has_the_controls_that_mitigations_use() {
        let vm = for_vm(&host(), CpuModel::Baseline, 1, true);
        let (intel, amd) = (find(&vm, 7, 0).unwrap(), find(&vm, 0x8000_0008, 0).unwrap());
        for bit in [10, 26, 27, 31] {
            assert_ne!(intel.edx & (1 << bit), 0, "leaf 7 EDX bit {bit}");
        }
        for bit in [12, 14, 15, 24, 25] {
            assert_ne!(amd.ebx & (1 << bit), 0, "leaf 0x80000008 EBX bit {bit}");
        }
        assert_eq!(
            intel.edx & (1 << 29),
            0,
            "ARCH_CAPABILITIES describes one host"
        );
    }
}
