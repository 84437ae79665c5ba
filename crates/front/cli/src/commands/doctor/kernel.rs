//! Checks of CPU, kernel and KVM.

use std::error::Error;
use std::path::Path;

use forkd_probe::Verdict as Kvm;
use rustix::io::Errno;

use super::{Check, number, read};

pub fn checks() -> Vec<Check> {
    vec![
        architecture(),
        kernel(),
        kvm(),
        nested(),
        cgroup(),
        controllers(),
        userfaultfd(),
        memfd(),
        pagemap_scan(),
        namespaces(),
        tun(),
        nftables(),
        entropy(),
        clock(),
    ]
}

fn architecture() -> Check {
    let found = std::env::consts::ARCH;
    if found == "x86_64" {
        Check::pass("architecture", found)
    } else {
        Check::fail("architecture", found, "forkd runs on x86_64")
    }
}

/// Major and minor of the running kernel.
fn release() -> Option<(u32, u32, String)> {
    let text = read("/proc/sys/kernel/osrelease")?;
    let mut parts = text.split(['.', '-']);
    let major = parts.next()?.parse().ok()?;
    let minor = parts.next()?.parse().ok()?;
    Some((major, minor, text))
}

fn kernel() -> Check {
    match release() {
        Some((major, minor, text)) if (major, minor) >= (6, 7) => Check::pass("kernel", text),
        Some((major, minor, text)) if (major, minor) >= (5, 15) => Check::warn(
            "kernel",
            text,
            "6.7 or later finds changed pages faster (PAGEMAP_SCAN)",
        ),
        Some((_, _, text)) => Check::fail("kernel", text, "Linux 5.15 or later is needed"),
        None => Check::skip("kernel", "the release cannot be read"),
    }
}

fn kvm() -> Check {
    let report = forkd_probe::probe();
    let detail = match (report.ns_per_iteration, &report.reason) {
        (Some(ns), _) => format!(
            "{}, {ns:.1} ns per loop in guest kernel mode",
            report.verdict.as_str()
        ),
        (None, Some(reason)) => format!("{}: {reason}", report.verdict.as_str()),
        (None, None) => report.verdict.as_str().to_owned(),
    };
    match report.verdict {
        Kvm::Native => Check::pass("kvm", detail),
        Kvm::Forbidden => Check::fail(
            "kvm",
            detail,
            "join the group of /dev/kvm: sudo usermod -aG kvm $USER, then log in again",
        ),
        Kvm::Interpreting => Check::fail(
            "kvm",
            detail,
            "this /dev/kvm interprets guest kernels; use `forkd machine start`",
        ),
        Kvm::Absent | Kvm::Broken => Check::fail(
            "kvm",
            detail,
            "switch virtualisation on in the firmware or for this VM, or use `forkd machine start`",
        ),
    }
}

fn nested() -> Check {
    let virtual_host = std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| {
        text.lines()
            .any(|line| line.starts_with("flags") && line.contains(" hypervisor"))
    });
    if virtual_host {
        Check::warn(
            "bare metal",
            "this host is a virtual machine itself",
            "nested guests work, and are slower",
        )
    } else {
        Check::pass("bare metal", "yes")
    }
}

fn cgroup() -> Check {
    if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        Check::pass("cgroup v2", "/sys/fs/cgroup")
    } else {
        Check::warn(
            "cgroup v2",
            "not mounted at /sys/fs/cgroup",
            "limits on memory and CPU of sandboxes need it: boot with systemd.unified_cgroup_hierarchy=1",
        )
    }
}

fn controllers() -> Check {
    let Some(text) = read("/sys/fs/cgroup/cgroup.controllers") else {
        return Check::skip("cgroup controllers", "no cgroup v2");
    };
    let missing: Vec<&str> = ["memory", "cpu", "pids", "io"]
        .into_iter()
        .filter(|wanted| !text.split_whitespace().any(|found| found == *wanted))
        .collect();
    if missing.is_empty() {
        Check::pass("cgroup controllers", text)
    } else {
        Check::warn(
            "cgroup controllers",
            format!("missing: {}", missing.join(", ")),
            "limits of these kinds are not enforced",
        )
    }
}

/// Opened like the VMM opens it: user-mode faults only, which needs no privilege.
fn userfaultfd() -> Check {
    match forkd_probe::follows_writes() {
        Ok(()) => Check::pass("userfaultfd", "follows writes to guest memory"),
        Err(error) => {
            let cause = error.source().map(|cause| format!(": {cause}"));
            Check::warn(
                "userfaultfd",
                format!("{error}{}", cause.unwrap_or_default()),
                "branches and checkpoints look at all memory; Linux 6.7 with CONFIG_USERFAULTFD follows writes",
            )
        }
    }
}

fn memfd() -> Check {
    match rustix::fs::memfd_create("forkd-doctor", rustix::fs::MemfdFlags::CLOEXEC) {
        Ok(_) => Check::pass("memfd", "works"),
        Err(Errno::NOSYS) => Check::fail(
            "memfd",
            "not in this kernel",
            "use a kernel with CONFIG_MEMFD_CREATE",
        ),
        Err(error) => Check::fail(
            "memfd",
            error.to_string(),
            "a sandbox around this shell may forbid it",
        ),
    }
}

fn pagemap_scan() -> Check {
    match release() {
        Some((major, minor, _)) if (major, minor) >= (6, 7) => {
            Check::pass("PAGEMAP_SCAN", "in this kernel")
        }
        Some(_) => Check::warn(
            "PAGEMAP_SCAN",
            "not in this kernel",
            "changed pages are found by reading /proc/self/pagemap, which is slower; Linux 6.7 has it",
        ),
        None => Check::skip("PAGEMAP_SCAN", "the release cannot be read"),
    }
}

/// Added to checks of features that networks of other systems need.
const NO_NETWORK: &str = "sandboxes do without it: their network ends in forkd-net";

fn namespaces() -> Check {
    let missing: Vec<&str> = ["mnt", "net", "pid", "user", "uts"]
        .into_iter()
        .filter(|name| !Path::new("/proc/self/ns").join(name).exists())
        .collect();
    if missing.is_empty() {
        Check::pass("namespaces", "mnt, net, pid, user, uts")
    } else {
        let missing = missing.join(", ");
        Check::skip(
            "namespaces",
            format!("missing: {missing}, another kernel has them; {NO_NETWORK}"),
        )
    }
}

fn tun() -> Check {
    let opened = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun");
    match opened {
        Ok(_) => Check::pass("tun", "/dev/net/tun opens"),
        Err(error) => Check::skip(
            "tun",
            format!("/dev/net/tun: {error}, try modprobe tun; {NO_NETWORK}"),
        ),
    }
}

fn nftables() -> Check {
    let found = ["/usr/sbin/nft", "/sbin/nft", "/usr/bin/nft"]
        .into_iter()
        .find(|path| Path::new(path).exists());
    match found {
        Some(path) => Check::pass("nftables", path),
        None => Check::skip(
            "nftables",
            format!("no nft program, try apt install nftables; {NO_NETWORK}"),
        ),
    }
}

fn entropy() -> Check {
    match number("/proc/sys/kernel/random/entropy_avail") {
        Some(bits) if bits >= 200 => Check::pass("entropy", format!("{bits} bits")),
        Some(bits) => Check::warn(
            "entropy",
            format!("{bits} bits"),
            "install haveged or give this VM a virtio-rng",
        ),
        None => Check::skip("entropy", "cannot be read"),
    }
}

fn clock() -> Check {
    if Path::new("/run/systemd/timesync/synchronized").exists() || Path::new("/run/chrony").exists()
    {
        Check::pass("time", "synchronised")
    } else {
        Check::warn(
            "time",
            "no time synchronisation found",
            "guests take their clock from this host: run chrony or systemd-timesyncd",
        )
    }
}
