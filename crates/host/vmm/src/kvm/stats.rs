//! KVM's own statistics of a VM and its vCPUs, through `KVM_GET_STATS_FD` (Linux 5.14).
//!
//! The descriptors are opened while the shell is built, because the filter of the control thread forbids the
//! request later. Reading them needs `pread` only and stops no vCPU. A host without the request has no
//! statistics.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;

/// `_IO(KVMIO, 0xce)` of linux/kvm.h.
const KVM_GET_STATS_FD: libc::Ioctl = 0xaece;
/// Length of `struct kvm_stats_header`.
const HEADER: usize = 24;
/// Length of `struct kvm_stats_desc` without the name.
const DESCRIPTION: usize = 16;
/// Limits on what a kernel may describe: names and number of statistics.
const MAX_NAME: usize = 256;
const MAX_STATISTICS: usize = 1024;

/// The statistics of a vCPU that are reported, as KVM names them.
const OF_VCPU: &[&str] = &[
    "exits",
    "mmio_exits",
    "io_exits",
    "halt_exits",
    "irq_injections",
    "pf_taken",
    "pf_fixed",
    "pf_spurious",
    "tlb_flush",
    "insn_emulation",
];
/// The same for the VM.
const OF_VM: &[&str] = &["pages_4k"];

/// The readable statistics of one machine.
#[derive(Default)]
pub struct Statistics {
    sources: Vec<Source>,
}

/// One descriptor, and where in it each reported value is.
struct Source {
    file: File,
    values: Vec<(&'static str, u64)>,
}

impl Statistics {
    pub(super) fn add_vm(&mut self, vm: &impl AsRawFd) {
        self.sources.extend(Source::open(vm, OF_VM));
    }

    pub(super) fn add_vcpu(&mut self, vcpu: &impl AsRawFd) {
        self.sources.extend(Source::open(vcpu, OF_VCPU));
    }

    /// The values as counters of the device `kvm`, summed over the vCPUs.
    pub fn counters(&self, out: &mut Vec<(String, u64)>) {
        for name in OF_VCPU.iter().chain(OF_VM) {
            let found: Vec<u64> = self.sources.iter().filter_map(|s| s.value(name)).collect();
            if !found.is_empty() {
                let sum = found.into_iter().fold(0_u64, u64::saturating_add);
                out.push((format!("kvm.{name}"), sum));
            }
        }
    }
}

impl Source {
    fn open(of: &impl AsRawFd, wanted: &[&'static str]) -> Option<Self> {
        // SAFETY: the request has no argument and returns a new descriptor or an error.
        let fd = unsafe { libc::ioctl(of.as_raw_fd(), KVM_GET_STATS_FD, 0) };
        if fd < 0 {
            return None;
        }
        // SAFETY: the descriptor is new, so that nothing else closes it.
        let file = unsafe { File::from_raw_fd(fd) };
        let values = locate(&file, wanted)?;
        Some(Self { file, values })
    }

    fn value(&self, name: &str) -> Option<u64> {
        let (_, at) = self.values.iter().find(|(known, _)| *known == name)?;
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, *at).ok()?;
        Some(u64::from_ne_bytes(bytes))
    }
}

/// Finds the offsets of the wanted values.
fn locate(file: &impl FileExt, wanted: &[&'static str]) -> Option<Vec<(&'static str, u64)>> {
    let mut header = [0; HEADER];
    file.read_exact_at(&mut header, 0).ok()?;
    let field = |n: usize| number(&header, n * 4);
    let (name_size, count) = (field(1)? as usize, field(2)? as usize);
    let (descriptions, data) = (u64::from(field(4)?), u64::from(field(5)?));
    if name_size > MAX_NAME || count > MAX_STATISTICS {
        return None;
    }
    let size = DESCRIPTION + name_size;
    let mut all = vec![0; size * count];
    file.read_exact_at(&mut all, descriptions).ok()?;
    let described = all.chunks_exact(size).filter_map(|one| {
        let name = one[DESCRIPTION..].split(|byte| *byte == 0).next()?;
        let known = wanted.iter().find(|wanted| wanted.as_bytes() == name)?;
        Some((*known, data + u64::from(number(one, 8)?)))
    });
    Some(described.collect())
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let four = bytes.get(at..at + 4)?.try_into().ok()?;
    Some(u32::from_ne_bytes(four))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// A file as KVM shows it: header, an identifier, descriptions, values.
    fn shown(names: &[&str], name_size: u32) -> File {
        let descriptions = 64_u32;
        let each = 16 + name_size;
        let data = descriptions + each * names.len() as u32;
        let mut bytes = Vec::new();
        for word in [0, name_size, names.len() as u32, 24, descriptions, data] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.resize(descriptions as usize, 0);
        for (n, name) in names.iter().enumerate() {
            bytes.extend([0; 8]);
            bytes.extend((n as u32 * 8).to_ne_bytes());
            bytes.extend([0; 4]);
            let mut padded = name.as_bytes().to_vec();
            padded.resize(name_size as usize, 0);
            bytes.extend(padded);
        }
        for n in 0..names.len() as u64 {
            bytes.extend((100 + n).to_ne_bytes());
        }
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        file
    }

    fn source(file: File) -> Option<Source> {
        let values = locate(&file, OF_VCPU)?;
        Some(Source { file, values })
    }

    #[test]
    fn values_are_found_by_name_and_summed_over_vcpus() {
        let two = ["pf_taken", "other", "exits"];
        let all = Statistics {
            sources: vec![
                source(shown(&two, 48)).unwrap(),
                source(shown(&two, 48)).unwrap(),
            ],
        };
        let mut out = Vec::new();
        all.counters(&mut out);
        assert_eq!(
            out,
            [
                ("kvm.exits".to_owned(), 204),
                ("kvm.pf_taken".to_owned(), 200)
            ]
        );
    }

    #[test]
    fn a_description_without_bounds_gives_nothing() {
        assert!(source(shown(&["exits"], 4096)).is_none());
        let mut short = tempfile::tempfile().unwrap();
        short.write_all(&[0xff; 24]).unwrap();
        assert!(source(short).is_none());
    }

    #[test]
    fn no_statistics_of_a_file_that_is_not_kvm() {
        let mut none = Statistics::default();
        none.add_vm(&tempfile::tempfile().unwrap());
        let mut out = Vec::new();
        none.counters(&mut out);
        assert!(out.is_empty());
    }
}
