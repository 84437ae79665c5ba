//! The counters that a VMM reports, and how to read a report.
//!
//! A report ([`Counters`]) is a list of names and numbers, such as `disk0.read_bytes`. [`COUNTERS`] is the
//! list of all counters with their kind and meaning. The sender may be compromised, so
//! [`Counters::known`] passes on only counters of the list, each at most once: the number of series that a
//! daemon keeps does not depend on the VMM.

use crate::{Counters, MAX_DISKS};

/// Whether a number only grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CounterKind {
    /// Grows from zero while the VMM process lives.
    Counter,
    /// Goes up and down.
    Gauge,
}

/// The description of a counter.
#[derive(Debug, PartialEq, Eq)]
pub struct CounterInfo {
    /// The devices that have it, without their number.
    pub devices: &'static [&'static str],
    pub name: &'static str,
    /// Whether it only grows.
    pub kind: CounterKind,
    /// One line for people.
    pub help: &'static str,
}

/// The value of a counter of [`COUNTERS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownCounter {
    pub info: &'static CounterInfo,
    /// The device, without its number.
    pub device: &'static str,
    /// The number of a disk.
    pub number: Option<u8>,
    pub value: u64,
}

const VIRTIO: &[&str] = &["rng", "balloon", "vsock", "net", "disk"];
const DISK: &[&str] = &["disk"];
const NET: &[&str] = &["net"];
const VSOCK: &[&str] = &["vsock"];
const BALLOON: &[&str] = &["balloon"];
const RNG: &[&str] = &["rng"];
const CONSOLE: &[&str] = &["console"];
/// KVM's own statistics, summed over the vCPUs.
const KVM: &[&str] = &["kvm"];
/// The machine itself.
const MACHINE: &[&str] = &["machine"];

const fn counter(
    devices: &'static [&'static str],
    name: &'static str,
    help: &'static str,
) -> CounterInfo {
    CounterInfo {
        devices,
        name,
        kind: CounterKind::Counter,
        help,
    }
}

const fn gauge(
    devices: &'static [&'static str],
    name: &'static str,
    help: &'static str,
) -> CounterInfo {
    CounterInfo {
        devices,
        name,
        kind: CounterKind::Gauge,
        help,
    }
}

/// Every counter that a VMM of this version reports.
#[rustfmt::skip]
pub const COUNTERS: &[CounterInfo] = &[
    counter(VIRTIO, "activations", "Times a driver became ready"),
    counter(VIRTIO, "resets", "Times a driver reset the device"),
    counter(VIRTIO, "failures", "Times the device met input it could not work with"),
    counter(VIRTIO, "bad_accesses", "Invalid register accesses"),
    counter(DISK, "reads", "Read requests"),
    counter(DISK, "read_bytes", "Bytes read"),
    counter(DISK, "writes", "Write requests"),
    counter(DISK, "write_bytes", "Bytes written"),
    counter(DISK, "flushes", "Flush requests"),
    counter(DISK, "discards", "Discarded ranges"),
    counter(DISK, "zeroes", "Ranges filled with zeroes"),
    counter(DISK, "errors", "Requests answered with an error"),
    counter(DISK, "no_space", "Requests refused for want of space"),
    counter(DISK, "throttled", "Times a request waited for the rate limit"),
    gauge(DISK, "layers", "Thin layers"),
    gauge(DISK, "layer_bytes", "Bytes of data in the layer that is written"),
    counter(NET, "rx_frames", "Frames to the guest"),
    counter(NET, "rx_bytes", "Bytes to the guest"),
    counter(NET, "rx_dropped", "Frames that did not fit the guest's buffers"),
    counter(NET, "rx_throttled", "Times frames to the guest waited for the rate limit"),
    counter(NET, "tx_frames", "Frames from the guest"),
    counter(NET, "tx_bytes", "Bytes from the guest"),
    counter(NET, "tx_dropped", "Frames that the back end did not take"),
    counter(NET, "tx_throttled", "Times frames from the guest waited for the rate limit"),
    counter(VSOCK, "packets_from_guest", "Packets from the guest"),
    counter(VSOCK, "bytes_from_guest", "Bytes of data from the guest"),
    counter(VSOCK, "packets_to_guest", "Packets to the guest"),
    counter(VSOCK, "bytes_to_guest", "Bytes of data to the guest"),
    counter(VSOCK, "host_connections", "Connections opened by clients of the host"),
    counter(VSOCK, "guest_connections", "Connections opened by the guest"),
    gauge(VSOCK, "open", "Open connections"),
    counter(VSOCK, "connection_resets", "Connections ended by a reset"),
    counter(VSOCK, "bad_clients", "Clients of the host with an invalid greeting"),
    counter(VSOCK, "bad_packets", "Invalid packets from the guest"),
    counter(VSOCK, "refused", "Refused connections"),
    counter(BALLOON, "inflated_bytes", "Bytes taken from the guest"),
    counter(BALLOON, "deflated_bytes", "Bytes given back to the guest"),
    counter(BALLOON, "reported_bytes", "Bytes the guest reported as free"),
    counter(BALLOON, "errors", "Ranges the host could not take"),
    counter(BALLOON, "bad_ranges", "Ranges outside guest memory"),
    gauge(BALLOON, "actual_bytes", "Size of the balloon as the guest reports it"),
    gauge(BALLOON, "target_bytes", "Requested size of the balloon"),
    gauge(BALLOON, "guest_swap_in", "Bytes the guest has swapped in"),
    gauge(BALLOON, "guest_swap_out", "Bytes the guest has swapped out"),
    gauge(BALLOON, "guest_major_faults", "Page faults in the guest that needed I/O"),
    gauge(BALLOON, "guest_minor_faults", "Page faults in the guest that needed none"),
    gauge(BALLOON, "guest_free", "Bytes of memory unused in the guest"),
    gauge(BALLOON, "guest_total", "Bytes of memory the guest has"),
    gauge(BALLOON, "guest_available", "Bytes the guest can use without swapping"),
    gauge(BALLOON, "guest_caches", "Bytes of the guest's page cache"),
    counter(RNG, "requests", "Buffers filled"),
    counter(RNG, "bytes", "Bytes of entropy"),
    counter(RNG, "throttled", "Times a request waited for the rate limit"),
    counter(RNG, "errors", "Times the host gave no entropy"),
    counter(CONSOLE, "printed", "Bytes printed by the guest"),
    counter(CONSOLE, "written", "Bytes written to the console file"),
    counter(CONSOLE, "dropped", "Bytes over the rate or the size of the console"),
    counter(CONSOLE, "write_errors", "Failed writes to the console file"),
    counter(CONSOLE, "fed", "Bytes given to the guest"),
    counter(MACHINE, "ready_signals", "Times the guest reported that it is ready"),
    counter(MACHINE, "dropped_notices", "Events dropped because the control thread was behind"),
    counter(MACHINE, "bus_locks", "Bus locks of the guest that were slowed down"),
    counter(KVM, "exits", "Exits of the vCPUs to the kernel"),
    counter(KVM, "mmio_exits", "Exits of the vCPUs to the VMM for memory-mapped I/O"),
    counter(KVM, "io_exits", "Exits of the vCPUs for port I/O"),
    counter(KVM, "halt_exits", "Times a vCPU halted"),
    counter(KVM, "irq_injections", "Interrupts given to the vCPUs"),
    counter(KVM, "pf_taken", "Page faults of the guest that KVM handled"),
    counter(KVM, "pf_fixed", "Page faults for which KVM mapped a page"),
    counter(KVM, "pf_spurious", "Page faults for a page that was mapped already"),
    counter(KVM, "tlb_flush", "Flushes of the translations of a vCPU"),
    counter(KVM, "insn_emulation", "Instructions that KVM emulated"),
    gauge(KVM, "pages_4k", "Pages of 4 KiB that KVM has mapped for the guest"),
];

impl CounterInfo {
    /// The name of the metric for one of its devices: `forkd_vmm_disk_read_bytes_total`.
    pub fn metric(&self, device: &str) -> String {
        let suffix = match self.kind {
            CounterKind::Counter => "_total",
            CounterKind::Gauge => "",
        };
        format!("forkd_vmm_{device}_{}{suffix}", self.name)
    }
}

impl Counters {
    /// The counters of [`COUNTERS`], each device's at most once; everything else is left out.
    pub fn known(&self) -> Vec<KnownCounter> {
        let mut known: Vec<KnownCounter> = Vec::with_capacity(self.0.len().min(MAX_KNOWN));
        for (name, value) in &self.0 {
            let Some(found) = parse(name, *value) else {
                continue;
            };
            let twice = known.iter().any(|other| {
                (other.device, other.number, other.info.name)
                    == (found.device, found.number, found.info.name)
            });
            if !twice {
                known.push(found);
            }
        }
        known
    }
}

/// At least as many as there are counters of all devices.
const MAX_KNOWN: usize = COUNTERS.len() + VIRTIO.len() * 4 + MAX_DISKS * 16;

fn parse(full: &str, value: u64) -> Option<KnownCounter> {
    let (device, name) = full.split_once('.')?;
    let kind = device.trim_end_matches(|c: char| c.is_ascii_digit());
    let number = match device.strip_prefix("disk") {
        Some(number) => Some(
            number
                .parse()
                .ok()
                .filter(|n| usize::from(*n) < MAX_DISKS)?,
        ),
        None if kind == device => None,
        None => return None,
    };
    COUNTERS
        .iter()
        .filter(|info| info.name == name)
        .find_map(|info| {
            let device = *info.devices.iter().find(|device| **device == kind)?;
            Some(KnownCounter {
                info,
                device,
                number,
                value,
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_and_strangers_left_out() {
        let report = Counters(
            [
                ("disk1.read_bytes", 7),
                ("rng.resets", 1),
                ("disk1.read_bytes", 8),
                ("disk9.read_bytes", 1),
                ("disk.read_bytes", 1),
                ("rng0.bytes", 1),
                ("rng.read_bytes", 1),
                ("made.up", 1),
                ("nothing", 1),
            ]
            .map(|(name, value)| (name.to_owned(), value))
            .to_vec(),
        );
        let known: Vec<_> = report
            .known()
            .iter()
            .map(|c| (c.info.metric(c.device), c.number, c.value))
            .collect();
        assert_eq!(
            known,
            [
                ("forkd_vmm_disk_read_bytes_total".to_owned(), Some(1), 7),
                ("forkd_vmm_rng_resets_total".to_owned(), None, 1),
            ]
        );
    }

    #[test]
    fn a_device_has_each_counter_once() {
        for (n, one) in COUNTERS.iter().enumerate() {
            for device in one.devices {
                let twice = COUNTERS[n + 1..]
                    .iter()
                    .any(|other| other.name == one.name && other.devices.contains(device));
                assert!(!twice, "{device}.{}", one.name);
            }
        }
    }
}
