//! Which vCPU states of a snapshot this host accepts.
//!
//! A state file is untrusted. It may only describe a CPU that [`super::cpuid`] would show on this host:
//! - feature bits are a subset of those shown, so nothing hidden (nested virtualisation, performance
//!   counters, enclaves) can be switched on;
//! - every other CPUID value is equal, except the fields in `HOST_DEPENDENT`;
//! - every model-specific register is one that the VMM itself saves ([`super::msr::is_saved`]).

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2, kvm_msr_entry};
use thiserror::Error;

use super::cpuid::{Register, register_mut, vendor};
use super::msr;
use crate::kvm::VcpuState;

/// Upper bound on the saved model-specific registers; KVM lists about 150 on current hosts.
const MAX_MSRS: usize = 1024;
/// Upper bound on the saved vector registers, in 32-bit words.
const MAX_XSAVE_WORDS: usize = 16 * 1024;

const EFER_SVM_ENABLE: u64 = 1 << 12;
const CR4_VMX_ENABLE: u64 = 1 << 13;

/// Why a saved vCPU is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CpuMismatch {
    /// The CPU vendor differs.
    #[error("the snapshot is of a {saved:?} CPU, this host has {host:?}")]
    Vendor {
        /// In the snapshot.
        saved: String,
        host: String,
    },
    /// The snapshot has feature bits that this host would not show.
    #[error(
        "the host lacks CPU features of the snapshot: leaf {leaf:#x}.{index} {register:?} bits {missing:#010x}"
    )]
    Features {
        leaf: u32,
        index: u32,
        register: Register,
        /// The bits that are not shown.
        missing: u32,
    },
    /// A CPUID leaf that is never shown, or not on this host, or is there twice.
    #[error("the snapshot has the CPUID leaf {leaf:#x}.{index}, which this host does not show")]
    Leaf { leaf: u32, index: u32 },
    /// A CPUID value differs from the one shown here.
    #[error(
        "the snapshot has {saved:#010x} in CPUID leaf {leaf:#x}.{index} {register:?}, this host shows {shown:#010x}"
    )]
    Value {
        leaf: u32,
        index: u32,
        register: Register,
        /// In the snapshot.
        saved: u32,
        shown: u32,
    },
    /// A model-specific register that the VMM would not have saved, or a value it cannot have had.
    #[error("the snapshot sets MSR {index:#x} to {value:#x}, which is not allowed")]
    Msr { index: u32, value: u64 },
    /// A control register enables nested virtualisation.
    #[error("the snapshot sets {name} to {value:#x}, which is not allowed")]
    Control { name: &'static str, value: u64 },
    /// A list is longer than any valid one.
    #[error("the snapshot has {count} {what}, more than {limit}")]
    TooMany {
        /// Kind of list.
        what: &'static str,
        count: usize,
        limit: usize,
    },
}

/// Leaves whose values describe the host's silicon and enable nothing: caches, TLBs, frequencies, core
/// types and brand strings.
const HOST_DEPENDENT_LEAVES: &[u32] = &[
    0x2,
    0x4,
    0x15,
    0x16,
    0x17,
    0x18,
    0x1a,
    0x4000_0010,
    0x8000_0002,
    0x8000_0003,
    0x8000_0004,
    0x8000_0005,
    0x8000_0006,
    0x8000_0019,
    0x8000_001a,
    0x8000_001d,
];

/// Bits of single registers that depend on the host and enable nothing.
const HOST_DEPENDENT: &[(u32, u32, Register, u32)] = &[
    // highest leaf
    (0, 0, Register::Eax, u32::MAX),
    (0x8000_0000, 0, Register::Eax, u32::MAX),
    // family, model and stepping; brand index and cache line size
    (1, 0, Register::Eax, u32::MAX),
    (1, 0, Register::Ebx, 0xffff),
    (0x8000_0001, 0, Register::Eax, u32::MAX),
    (0x8000_0001, 0, Register::Ebx, u32::MAX),
    // highest subleaf
    (7, 0, Register::Eax, u32::MAX),
    // size of the state that is enabled now, and of all state
    (0xd, 0, Register::Ebx, u32::MAX),
    (0xd, 0, Register::Ecx, u32::MAX),
    (0xd, 1, Register::Ebx, u32::MAX),
    // size of microcode patches
    (0x8000_0021, 0, Register::Ebx, u32::MAX),
];

/// Registers of which each bit is a feature; all registers of the leaf where none is named.
const FEATURES: &[(u32, Option<Register>)] = &[
    (1, Some(Register::Ecx)),
    (1, Some(Register::Edx)),
    (6, None),
    (7, None),
    (0xd, Some(Register::Eax)),
    (0xd, Some(Register::Edx)),
    (0x19, None),
    (0x24, None),
    (0x4000_0001, None),
    (0x8000_0001, Some(Register::Ecx)),
    (0x8000_0001, Some(Register::Edx)),
    (0x8000_0007, None),
    (0x8000_0008, Some(Register::Ebx)),
    (0x8000_0020, None),
    (0x8000_0021, None),
];

/// Subleaves of leaf 0xd from here on give sizes and offsets, not features.
const FIRST_XSAVE_COMPONENT: u32 = 2;
/// Widths of addresses, one per byte: a snapshot may have narrower ones than the host.
const ADDRESS_WIDTHS: (u32, Register) = (0x8000_0008, Register::Eax);

const REGISTERS: [Register; 4] = [Register::Eax, Register::Ebx, Register::Ecx, Register::Edx];

/// Checks a saved vCPU against the CPUID that a new vCPU with the same number would be shown here, and
/// against the model-specific registers that this host saves.
pub fn check(
    saved: &VcpuState,
    shown: &[kvm_cpuid_entry2],
    msr_indices: &[u32],
) -> Result<(), CpuMismatch> {
    for (what, count, limit) in [
        ("CPUID entries", saved.cpuid.len(), KVM_MAX_CPUID_ENTRIES),
        ("model-specific registers", saved.msrs.len(), MAX_MSRS),
        (
            "words of vector registers",
            saved.xsave.len(),
            MAX_XSAVE_WORDS,
        ),
    ] {
        if count > limit {
            return Err(CpuMismatch::TooMany { what, count, limit });
        }
    }
    check_cpuid(&saved.cpuid, shown)?;
    let (efer, cr4) = (saved.sregs.efer, saved.sregs.cr4);
    if efer & EFER_SVM_ENABLE != 0 {
        let name = "EFER";
        return Err(CpuMismatch::Control { name, value: efer });
    }
    if cr4 & CR4_VMX_ENABLE != 0 {
        let name = "CR4";
        return Err(CpuMismatch::Control { name, value: cr4 });
    }
    match saved.msrs.iter().find(|msr| !allowed(msr, msr_indices)) {
        Some(msr) => Err(CpuMismatch::Msr {
            index: msr.index,
            value: msr.data,
        }),
        None => Ok(()),
    }
}

/// A register that is zero needs not exist here: zero is the value it has after a reset.
fn allowed(msr: &kvm_msr_entry, indices: &[u32]) -> bool {
    let known = indices.contains(&msr.index) || msr.data == 0;
    let value = match msr.index {
        msr::EFER => msr.data & EFER_SVM_ENABLE == 0,
        msr::FEATURE_CONTROL => msr.data & !msr::FEATURE_CONTROL_LOCKED == 0,
        _ => true,
    };
    known && value && msr::is_saved(msr.index)
}

fn check_cpuid(saved: &[kvm_cpuid_entry2], shown: &[kvm_cpuid_entry2]) -> Result<(), CpuMismatch> {
    let (saved_vendor, host) = (vendor(saved), vendor(shown));
    if saved_vendor != host {
        return Err(CpuMismatch::Vendor {
            saved: saved_vendor,
            host,
        });
    }
    for (n, entry) in saved.iter().enumerate() {
        let (leaf, index) = (entry.function, entry.index);
        // KVM takes the first of two, so a second one would not be what is checked here.
        let twice = saved
            .iter()
            .skip(n + 1)
            .any(|later| same_leaf(later, entry));
        if twice {
            return Err(CpuMismatch::Leaf { leaf, index });
        }
        match shown.iter().find(|shown| same_leaf(shown, entry)) {
            Some(shown) => check_leaf(*entry, *shown)?,
            None if is_harmless(entry) => {}
            None => return Err(CpuMismatch::Leaf { leaf, index }),
        }
    }
    Ok(())
}

fn same_leaf(one: &kvm_cpuid_entry2, other: &kvm_cpuid_entry2) -> bool {
    (one.function, one.index, one.flags) == (other.function, other.index, other.flags)
}

/// A leaf that this host does not have may still be shown if it enables nothing.
fn is_harmless(entry: &kvm_cpuid_entry2) -> bool {
    let zero = [entry.eax, entry.ebx, entry.ecx, entry.edx] == [0; 4];
    zero || HOST_DEPENDENT_LEAVES.contains(&entry.function)
}

fn check_leaf(mut saved: kvm_cpuid_entry2, mut shown: kvm_cpuid_entry2) -> Result<(), CpuMismatch> {
    let (leaf, index) = (saved.function, saved.index);
    if HOST_DEPENDENT_LEAVES.contains(&leaf) {
        return Ok(());
    }
    for register in REGISTERS {
        let free = HOST_DEPENDENT
            .iter()
            .find(|(l, i, r, _)| (*l, *i, *r) == (leaf, index, register))
            .map_or(0, |(_, _, _, bits)| *bits);
        let (saved, shown) = (
            *register_mut(&mut saved, register) & !free,
            *register_mut(&mut shown, register) & !free,
        );
        if is_feature(leaf, index, register) {
            let missing = saved & !shown;
            if missing != 0 {
                return Err(CpuMismatch::Features {
                    leaf,
                    index,
                    register,
                    missing,
                });
            }
            continue;
        }
        let narrower = (leaf, register) == ADDRESS_WIDTHS
            && saved
                .to_le_bytes()
                .iter()
                .zip(shown.to_le_bytes())
                .all(|(saved, shown)| *saved <= shown);
        if saved != shown && !narrower {
            return Err(CpuMismatch::Value {
                leaf,
                index,
                register,
                saved,
                shown,
            });
        }
    }
    Ok(())
}

fn is_feature(leaf: u32, index: u32, register: Register) -> bool {
    let component = leaf == 0xd && index >= FIRST_XSAVE_COMPONENT;
    !component
        && FEATURES
            .iter()
            .any(|(l, r)| *l == leaf && r.is_none_or(|r| r == register))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::x86_64::cpuid::{for_vcpu, for_vm};
    use forkd_vmm_proto::CpuModel;

    const LISTED: &[u32] = &[0x10, msr::FEATURE_CONTROL, 0x480, msr::EFER];

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
            entry(1, 0, [0, 0, u32::MAX, u32::MAX]),
            entry(7, 0, [0, u32::MAX, u32::MAX, u32::MAX]),
            entry(4, 0, [7, 7, 7, 7]),
            entry(0xa, 0, [1, 1, 1, 1]),
            entry(0xb, 0, [0; 4]),
            entry(0x4000_0001, 0, [u32::MAX, 0, 0, 0]),
            entry(0x8000_0001, 0, [0, 0, u32::MAX, u32::MAX]),
            entry(0x8000_0008, 0, [0x3030, u32::MAX, 0, 0]),
        ]
    }

    fn shown() -> Vec<kvm_cpuid_entry2> {
        for_vcpu(&for_vm(&host(), CpuModel::Host, 2, true), 1)
    }

    fn saved() -> VcpuState {
        VcpuState {
            cpuid: shown(),
            regs: Default::default(),
            sregs: Default::default(),
            xsave: vec![],
            xcrs: None,
            debugregs: Default::default(),
            events: Default::default(),
            mp_state: Default::default(),
            lapic: Default::default(),
            msrs: vec![],
            tsc_khz: None,
        }
    }

    fn verdict(change: impl FnOnce(&mut VcpuState)) -> Result<(), CpuMismatch> {
        let mut state = saved();
        change(&mut state);
        check(&state, &shown(), LISTED)
    }

    fn leaf(state: &mut VcpuState, function: u32) -> &mut kvm_cpuid_entry2 {
        state
            .cpuid
            .iter_mut()
            .find(|e| e.function == function)
            .unwrap()
    }

    fn msr(index: u32, data: u64) -> kvm_msr_entry {
        kvm_msr_entry {
            index,
            data,
            ..kvm_msr_entry::default()
        }
    }

    #[test]
    fn what_the_host_shows_is_accepted_and_so_is_less() {
        assert_eq!(verdict(|_| {}), Ok(()));
        assert_eq!(verdict(|s| leaf(s, 7).ebx &= !(1 << 5)), Ok(()));
        assert_eq!(verdict(|s| leaf(s, 0x8000_0008).eax = 0x302e), Ok(()));
        assert_eq!(verdict(|s| leaf(s, 4).eax = 99), Ok(()));
        assert_eq!(verdict(|s| leaf(s, 1).eax = 99), Ok(()));
        assert_eq!(verdict(|s| s.cpuid.push(entry(0x17, 0, [9; 4]))), Ok(()));
        assert_eq!(
            verdict(|s| s.msrs = vec![msr(0x10, 77), msr(0x999, 0)]),
            Ok(())
        );
    }

    #[test]
    fn hidden_features_are_refused_though_the_host_supports_them() {
        type Show = fn(&mut kvm_cpuid_entry2);
        let features: [(u32, Show); 4] = [
            (1, |e| e.ecx |= 1 << 5),
            (7, |e| e.ebx |= 1 << 2),
            (0x8000_0001, |e| e.ecx |= 1 << 2),
            (0x4000_0001, |e| e.eax |= 1 << 4),
        ];
        for (function, set) in features {
            let refused = verdict(|s| set(leaf(s, function)));
            assert!(
                matches!(refused, Err(CpuMismatch::Features { leaf, .. }) if leaf == function),
                "{function:#x}: {refused:?}"
            );
        }
        let pmu = CpuMismatch::Leaf {
            leaf: 0xa,
            index: 0,
        };
        assert_eq!(verdict(|s| s.cpuid.push(entry(0xa, 0, [1; 4]))), Err(pmu));
    }

    #[test]
    fn a_missing_feature_is_named() {
        let mut lesser = shown();
        lesser.iter_mut().find(|e| e.function == 7).unwrap().ebx &= !(1 << 5);
        assert_eq!(
            check(&saved(), &lesser, LISTED),
            Err(CpuMismatch::Features {
                leaf: 7,
                index: 0,
                register: Register::Ebx,
                missing: 1 << 5
            })
        );
        let mut other = shown();
        find_mut(&mut other, 0).ebx = 1;
        assert!(matches!(
            check(&saved(), &other, LISTED),
            Err(CpuMismatch::Vendor { .. })
        ));
    }

    fn find_mut(entries: &mut [kvm_cpuid_entry2], function: u32) -> &mut kvm_cpuid_entry2 {
        entries.iter_mut().find(|e| e.function == function).unwrap()
    }

    #[test]
    fn other_values_doubled_leaves_and_wider_addresses_are_refused() {
        let refused = [
            verdict(|s| leaf(s, 0xb).edx = 9),
            verdict(|s| leaf(s, 1).ebx ^= 1 << 24),
            verdict(|s| leaf(s, 0x8000_0008).eax = 0x3031),
            verdict(|s| s.cpuid.push(entry(1, 0, [0; 4]))),
            verdict(|s| s.cpuid.push(entry(0x4000_0100, 0, [1; 4]))),
            verdict(|s| s.cpuid = vec![entry(0x4, 0, [0; 4]); 1000]),
            verdict(|s| s.msrs = vec![msr(0x10, 0); MAX_MSRS + 1]),
            verdict(|s| s.xsave = vec![0; MAX_XSAVE_WORDS + 1]),
        ];
        for (n, refused) in refused.iter().enumerate() {
            assert!(refused.is_err(), "case {n}");
        }
    }

    #[test]
    fn registers_of_hidden_features_are_refused() {
        let refused = [
            // not listed here; VMX; async page faults; Hyper-V; nested SVM; VMX enabled in FEATURE_CONTROL
            msr(0x999, 1),
            msr(0x480, 0),
            msr(0x4b56_4d02, 1),
            msr(0x4000_0000, 1),
            msr(msr::EFER, 1 << 12 | 1),
            msr(msr::FEATURE_CONTROL, 5),
        ];
        for bad in refused {
            let verdict = verdict(|s| s.msrs = vec![msr(0x10, 1), bad]);
            let expected = CpuMismatch::Msr {
                index: bad.index,
                value: bad.data,
            };
            assert_eq!(verdict, Err(expected));
        }
        assert_eq!(
            verdict(|s| s.msrs = vec![msr(msr::FEATURE_CONTROL, 1), msr(msr::EFER, 0xd01)]),
            Ok(())
        );
        assert!(verdict(|s| s.sregs.efer = 1 << 12).is_err());
        assert!(verdict(|s| s.sregs.cr4 = 1 << 13).is_err());
    }
}
