//! Optional protections of KVM against a hostile guest.
//!
//! Each one is enabled where the host's KVM offers it. A VM runs without those that it does not offer:
//! they are defence in depth, and older kernels have none of them.

use kvm_bindings::{
    KVM_BUS_LOCK_DETECTION_EXIT, KVM_CAP_ENFORCE_PV_FEATURE_CPUID, KVM_CAP_PMU_CAPABILITY,
    KVM_CAP_X86_BUS_LOCK_EXIT, KVM_CAP_X86_NOTIFY_VMEXIT, KVM_PMU_CAP_DISABLE,
    KVM_X86_NOTIFY_VMEXIT_ENABLED, kvm_enable_cap,
};
use kvm_ioctls::VmFd;

/// A capability of a VM, the bits its check must report, and its first argument.
struct Protection {
    name: &'static str,
    number: u32,
    needs: u32,
    argument: u64,
}

const PROTECTIONS: [Protection; 3] = [
    // A guest that keeps its CPU from taking interrupts (an endless microcode loop) is called out.
    Protection {
        name: "NOTIFY_VMEXIT",
        number: KVM_CAP_X86_NOTIFY_VMEXIT,
        needs: 1,
        argument: KVM_X86_NOTIFY_VMEXIT_ENABLED as u64,
    },
    // A locked access across two cache lines stops all CPUs of the host: the vCPU exits and is slowed down.
    Protection {
        name: "BUS_LOCK_EXIT",
        number: KVM_CAP_X86_BUS_LOCK_EXIT,
        needs: KVM_BUS_LOCK_DETECTION_EXIT,
        argument: KVM_BUS_LOCK_DETECTION_EXIT as u64,
    },
    // CPUID hides the performance counters, but on AMD the first four work without being shown.
    Protection {
        name: "PMU_CAPABILITY",
        number: KVM_CAP_PMU_CAPABILITY,
        needs: KVM_PMU_CAP_DISABLE,
        argument: KVM_PMU_CAP_DISABLE as u64,
    },
];

/// The protections of one VM.
#[derive(Debug)]
pub(super) struct Hardening {
    /// Paravirtual features that CPUID hides do not work either; to be enabled for each vCPU.
    pub(super) enforce_pv_features: bool,
    /// Not offered, or refused.
    pub(super) missing: Vec<&'static str>,
}

impl Hardening {
    /// Enables the protections of a VM that has no vCPU yet.
    pub(super) fn enable(vm: &VmFd) -> Self {
        let mut missing = Vec::new();
        for protection in &PROTECTIONS {
            let offered = offers(vm, protection.number) & protection.needs == protection.needs;
            let enable = capability(protection.number, protection.argument);
            if !offered || vm.enable_cap(&enable).is_err() {
                missing.push(protection.name);
            }
        }
        let enforce_pv_features = offers(vm, KVM_CAP_ENFORCE_PV_FEATURE_CPUID) != 0;
        if !enforce_pv_features {
            missing.push("ENFORCE_PV_FEATURE_CPUID");
        }
        Self {
            enforce_pv_features,
            missing,
        }
    }
}

/// The value KVM reports for a capability; zero for an unknown one.
fn offers(vm: &VmFd, number: u32) -> u32 {
    u32::try_from(vm.check_extension_raw(number.into())).unwrap_or(0)
}

/// A request to enable a capability.
pub(super) fn capability(number: u32, argument: u64) -> kvm_enable_cap {
    kvm_enable_cap {
        cap: number,
        args: [argument, 0, 0, 0],
        ..kvm_enable_cap::default()
    }
}

#[cfg(test)]
mod tests {
    use kvm_ioctls::Kvm;

    use super::*;

    #[test]
    fn what_the_host_offers_is_enabled() {
        let Ok(kvm) = Kvm::new() else {
            eprintln!("no /dev/kvm on this host: nothing was tested");
            return;
        };
        let vm = kvm.create_vm().unwrap();
        let hardening = Hardening::enable(&vm);
        for protection in &PROTECTIONS {
            let offered = offers(&vm, protection.number) & protection.needs == protection.needs;
            let missing = hardening.missing.contains(&protection.name);
            assert_ne!(offered, missing, "{}", protection.name);
        }
        assert_ne!(
            hardening.enforce_pv_features,
            hardening.missing.contains(&"ENFORCE_PV_FEATURE_CPUID")
        );
    }
}
