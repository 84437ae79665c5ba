//! One virtual CPU: running it, and saving and restoring its state.
//!
//! A restore sets CPUID first, since KVM validates the other registers against it, and the TSC before its
//! deadline. The vCPU must not run during either.

use std::os::fd::AsRawFd;

use kvm_bindings::{
    CpuId, Msrs, Xsave, kvm_cpuid_entry2, kvm_debugregs, kvm_fpu, kvm_lapic_state, kvm_mp_state,
    kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};

use super::{KvmError, RunPage, Statistics, refused};
use crate::arch::x86_64::msr;

pub use kvm_ioctls::VcpuExit;

/// The exit of a vCPU that locked the bus; kvm-ioctls has no name for it.
pub const EXIT_BUS_LOCK: u32 = kvm_bindings::KVM_EXIT_X86_BUS_LOCK;

/// How many registers are read or written in one call.
const MSR_CHUNK: usize = 64;
/// KVM lets guests run with a clock this far off without scaling: 250 parts per million.
const TSC_TOLERANCE: u32 = 4000;

// linux/kvm.h, since 6.11
const PRE_FAULT_MEMORY: libc::Ioctl = 0xc040_aed5_u32 as libc::Ioctl;

/// `struct kvm_pre_fault_memory`. The kernel advances `gpa` and lowers `size`.
#[repr(C)]
#[derive(Default)]
struct PreFault {
    gpa: u64,
    size: u64,
    flags: u64,
    padding: [u64; 5],
}

/// A vCPU as plain data.
#[derive(Clone, Serialize, Deserialize)]
pub struct VcpuState {
    pub cpuid: Vec<kvm_cpuid_entry2>,
    pub regs: kvm_regs,
    /// Segment and control registers.
    pub sregs: kvm_sregs,
    /// FPU and vector registers, in 32-bit words.
    pub xsave: Vec<u32>,
    /// Extended control registers; none where the host has none.
    pub xcrs: Option<kvm_xcrs>,
    pub debugregs: kvm_debugregs,
    /// Exceptions and interrupts under way.
    pub events: kvm_vcpu_events,
    /// Running, halted, or waiting for start-up.
    pub mp_state: kvm_mp_state,
    /// Local interrupt controller.
    pub lapic: kvm_lapic_state,
    pub msrs: Vec<kvm_msr_entry>,
    /// How fast the time stamp counter runs; none where the host does not tell.
    pub tsc_khz: Option<u32>,
}

/// A virtual CPU.
pub struct Vcpu {
    fd: VcpuFd,
    xsave_size: usize,
    /// CPUID as it was set. KVM's answer has bits that follow other registers, and on hosts that cannot trap
    /// the instruction also bits that should be hidden.
    cpuid: Vec<kvm_cpuid_entry2>,
}

impl Vcpu {
    pub(super) fn new(fd: VcpuFd, xsave_size: usize) -> Self {
        Self {
            fd,
            xsave_size,
            cpuid: Vec::new(),
        }
    }

    /// Adds the statistics of this vCPU.
    pub fn add_statistics(&self, to: &mut Statistics) {
        to.add_vcpu(&self.fd);
    }

    /// The page through which it can be called out of the guest.
    pub fn run_page(&self) -> Result<RunPage, KvmError> {
        RunPage::map(self.fd.as_raw_fd())
    }

    /// Runs the guest until it needs something. An interruption is an error of kind `Interrupted`.
    pub fn run(&mut self) -> std::io::Result<VcpuExit<'_>> {
        self.fd
            .run()
            .map_err(|e| std::io::Error::from_raw_os_error(e.errno()))
    }

    /// Gives the guest pages that the host has, so that the guest needs no page fault for them. A page that the host has
    /// for reading only is given for reading. Fails on a KVM older than Linux 6.11 and without nested page tables.
    pub fn pre_fault(&self, guest: u64, len: u64) -> std::io::Result<()> {
        let mut range = PreFault {
            gpa: guest,
            size: len,
            ..PreFault::default()
        };
        while range.size > 0 {
            let before = range.size;
            // SAFETY: `range` has the layout of struct kvm_pre_fault_memory and outlives the call. No memory of this
            // process changes.
            let rc = unsafe { libc::ioctl(self.fd.as_raw_fd(), PRE_FAULT_MEMORY, &mut range) };
            if rc != 0 {
                let error = std::io::Error::last_os_error();
                if error.kind() != std::io::ErrorKind::Interrupted {
                    return Err(error);
                }
            } else if range.size >= before {
                return Err(std::io::ErrorKind::InvalidData.into());
            }
        }
        Ok(())
    }

    /// Sets what CPUID shows.
    pub fn set_cpuid(&mut self, entries: &[kvm_cpuid_entry2]) -> Result<(), KvmError> {
        if self.cpuid == entries {
            return Ok(());
        }
        let cpuid = CpuId::from_entries(entries).map_err(|_| KvmError::Size { what: "CPUID" })?;
        self.fd.set_cpuid2(&cpuid).map_err(refused("set CPUID"))?;
        self.cpuid = entries.to_vec();
        Ok(())
    }

    /// The state of a CPU that has just been switched on and starts with `regs` and `sregs`.
    pub fn start_with(&self, regs: &kvm_regs, sregs: &kvm_sregs) -> Result<(), KvmError> {
        self.fd
            .set_sregs(sregs)
            .map_err(refused("set control registers"))?;
        self.fd.set_regs(regs).map_err(refused("set registers"))
    }

    /// Segment and control registers.
    pub fn sregs(&self) -> Result<kvm_sregs, KvmError> {
        self.fd
            .get_sregs()
            .map_err(refused("read control registers"))
    }

    /// Sets the power-on state: FPU, model-specific registers, interrupt pins.
    pub fn power_on(&self, msrs: &[kvm_msr_entry]) -> Result<(), KvmError> {
        let fpu = kvm_fpu {
            fcw: 0x37f,
            mxcsr: 0x1f80,
            ..kvm_fpu::default()
        };
        // A host that lacks one of these leaves the register at its own reset value, which does as well.
        let _ = self.fd.set_fpu(&fpu);
        for msr in msrs {
            let _ = self.write_msrs(std::slice::from_ref(msr));
        }
        self.wire_interrupt_pins()
    }

    /// Legacy interrupts at pin 0, non-maskable ones at pin 1.
    fn wire_interrupt_pins(&self) -> Result<(), KvmError> {
        const LVT0: usize = 0x350;
        const LVT1: usize = 0x360;
        const DELIVERY_MASK: u32 = 0x700;
        const EXTERNAL: u32 = 0x700;
        const NMI: u32 = 0x400;
        let mut lapic = self.lapic()?;
        for (register, mode) in [(LVT0, EXTERNAL), (LVT1, NMI)] {
            let value = lapic_read(&lapic, register) & !DELIVERY_MASK | mode;
            lapic_write(&mut lapic, register, value);
        }
        self.fd
            .set_lapic(&lapic)
            .map_err(refused("set the local interrupt controller"))
    }

    fn lapic(&self) -> Result<kvm_lapic_state, KvmError> {
        self.fd
            .get_lapic()
            .map_err(refused("read the local interrupt controller"))
    }

    /// The state; the vCPU must not be running. `indices` are the model-specific registers to save; those
    /// that cannot be read are left out.
    pub fn save(&self, indices: &[u32]) -> Result<VcpuState, KvmError> {
        // Asking for the run state makes KVM settle a pending start-up, so it comes first.
        let mp_state = self
            .fd
            .get_mp_state()
            .map_err(refused("read the run state"))?;
        Ok(VcpuState {
            cpuid: self.cpuid.clone(),
            regs: self.fd.get_regs().map_err(refused("read registers"))?,
            sregs: self.sregs()?,
            xsave: self.xsave()?,
            xcrs: self.fd.get_xcrs().ok(),
            debugregs: self
                .fd
                .get_debug_regs()
                .map_err(refused("read debug registers"))?,
            mp_state,
            lapic: self.lapic()?,
            msrs: self.read_msrs(indices)?,
            events: self
                .fd
                .get_vcpu_events()
                .map_err(refused("read pending events"))?,
            tsc_khz: self.fd.get_tsc_khz().ok().filter(|khz| *khz > 0),
        })
    }

    /// Takes over saved state, which has been outside the process.
    pub fn restore(&mut self, state: &VcpuState) -> Result<(), KvmError> {
        self.set_cpuid(&state.cpuid)?;
        self.set_tsc_rate(state.tsc_khz)?;
        self.fd
            .set_mp_state(state.mp_state)
            .map_err(refused("set the run state"))?;
        self.fd
            .set_sregs(&state.sregs)
            .map_err(refused("set control registers"))?;
        self.fd
            .set_regs(&state.regs)
            .map_err(refused("set registers"))?;
        if let Some(xcrs) = &state.xcrs {
            self.fd
                .set_xcrs(xcrs)
                .map_err(refused("set extended control registers"))?;
        }
        self.set_xsave(&state.xsave)?;
        self.fd
            .set_debug_regs(&state.debugregs)
            .map_err(refused("set debug registers"))?;
        self.fd
            .set_lapic(&state.lapic)
            .map_err(refused("set the local interrupt controller"))?;
        self.restore_msrs(&state.msrs)?;
        self.fd
            .set_vcpu_events(&state.events)
            .map_err(refused("set pending events"))?;
        // Fails for a guest without a paravirtual clock, which has no way to learn of the stop.
        let _ = self.fd.kvmclock_ctrl();
        Ok(())
    }

    /// Tells a guest with a paravirtual clock that it was stopped, so that its watchdogs keep quiet.
    pub fn note_pause(&self) {
        let _ = self.fd.kvmclock_ctrl();
    }

    fn set_tsc_rate(&self, saved: Option<u32>) -> Result<(), KvmError> {
        let (Some(saved), Ok(host)) = (saved, self.fd.get_tsc_khz()) else {
            return Ok(());
        };
        if saved.abs_diff(host) <= saved / TSC_TOLERANCE {
            return Ok(());
        }
        self.fd
            .set_tsc_khz(saved)
            .map_err(|_| KvmError::TscRate { saved, host })
    }

    fn xsave(&self) -> Result<Vec<u32>, KvmError> {
        let plain = size_of::<kvm_xsave>();
        if self.xsave_size <= plain {
            let area = self
                .fd
                .get_xsave()
                .map_err(refused("read vector registers"))?;
            return Ok(area.region.to_vec());
        }
        let extra = (self.xsave_size - plain).div_ceil(4);
        let mut area = Xsave::new(extra).map_err(|_| KvmError::Size {
            what: "vector registers",
        })?;
        // SAFETY: the area has the size KVM asks for on this VM.
        unsafe { self.fd.get_xsave2(&mut area) }.map_err(refused("read vector registers"))?;
        let mut words = area.as_fam_struct_ref().xsave.region.to_vec();
        words.extend_from_slice(area.as_slice());
        Ok(words)
    }

    fn set_xsave(&self, words: &[u32]) -> Result<(), KvmError> {
        let what = "vector registers";
        let plain = size_of::<kvm_xsave>() / 4;
        let (head, tail) = words
            .split_at_checked(plain)
            .ok_or(KvmError::Size { what })?;
        // KVM reads as much as this VM's CPUs may have, so a larger area would be cut off in the middle
        // and a smaller one read past its end.
        let extra = (self.xsave_size - plain * 4).div_ceil(4);
        if tail.len() > extra && tail.get(extra..).is_some_and(|t| t.iter().any(|w| *w != 0)) {
            return Err(KvmError::Size { what });
        }
        let mut area = Xsave::new(extra).map_err(|_| KvmError::Size { what })?;
        for (to, from) in area.as_mut_slice().iter_mut().zip(tail) {
            *to = *from;
        }
        // SAFETY: writing plain words into the fixed part; the length of the flexible part is untouched.
        unsafe {
            area.as_mut_fam_struct().xsave.region.copy_from_slice(head);
        }
        // SAFETY: the area has the size KVM reads on this VM.
        unsafe { self.fd.set_xsave2(&area) }.map_err(refused("set vector registers"))
    }

    /// Reads what can be read. A call stops at the first register that cannot be, so go on after it.
    fn read_msrs(&self, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, KvmError> {
        let mut out = Vec::with_capacity(indices.len());
        let mut left = indices;
        while !left.is_empty() {
            let chunk = &left[..left.len().min(MSR_CHUNK)];
            let entries: Vec<_> = chunk
                .iter()
                .map(|&index| kvm_msr_entry {
                    index,
                    ..kvm_msr_entry::default()
                })
                .collect();
            let mut msrs = Msrs::from_entries(&entries).map_err(|_| KvmError::Size {
                what: "list of model-specific registers",
            })?;
            let read = self
                .fd
                .get_msrs(&mut msrs)
                .map_err(refused("read model-specific registers"))?;
            out.extend_from_slice(msrs.as_slice().get(..read).unwrap_or_default());
            let skip = if read < chunk.len() { read + 1 } else { read };
            left = &left[skip..];
        }
        Ok(out)
    }

    /// Writes registers; returns how many were taken.
    fn write_msrs(&self, entries: &[kvm_msr_entry]) -> Result<usize, KvmError> {
        let msrs = Msrs::from_entries(entries).map_err(|_| KvmError::Size {
            what: "list of model-specific registers",
        })?;
        self.fd
            .set_msrs(&msrs)
            .map_err(refused("set model-specific registers"))
    }

    fn restore_msrs(&self, saved: &[kvm_msr_entry]) -> Result<(), KvmError> {
        let mut msrs = saved.to_vec();
        msr::revive_deadline(&mut msrs);
        msr::restore_order(&mut msrs);
        // KVM complains in the host's log about a write of this one, whatever the value, where the processor
        // has no virtual branch records.
        let current = self.read_msrs(&[msr::DEBUGCTL])?;
        msrs.retain(|saved| saved.index != msr::DEBUGCTL || !same(current.first(), saved));
        let mut left = msrs.as_slice();
        while !left.is_empty() {
            let chunk = &left[..left.len().min(MSR_CHUNK)];
            let taken = self.write_msrs(chunk)?;
            let Some(refused) = chunk.get(taken) else {
                left = &left[chunk.len()..];
                continue;
            };
            // A register that cannot be written is no loss if it has the value already.
            let now = self.read_msrs(&[refused.index])?;
            if !same(now.first(), refused) {
                return Err(KvmError::Msr {
                    index: refused.index,
                    value: refused.data,
                });
            }
            left = &left[taken + 1..];
        }
        Ok(())
    }
}

/// Whether a register has the value that was saved; one that cannot be read is zero.
fn same(current: Option<&kvm_msr_entry>, saved: &kvm_msr_entry) -> bool {
    current.map_or(0, |current| current.data) == saved.data
}

fn lapic_read(lapic: &kvm_lapic_state, register: usize) -> u32 {
    let mut bytes = [0; 4];
    for (to, from) in bytes.iter_mut().zip(lapic.regs.iter().skip(register)) {
        *to = *from as u8;
    }
    u32::from_le_bytes(bytes)
}

fn lapic_write(lapic: &mut kvm_lapic_state, register: usize, value: u32) {
    for (to, from) in lapic
        .regs
        .iter_mut()
        .skip(register)
        .zip(value.to_le_bytes())
    {
        *to = from as _;
    }
}
