//! Connections that a fork has inherited.
//!
//! Parent and child hold the same TCP connections with the same sequence numbers. The child's are reset
//! without a packet to the peer, which still talks to the parent. A process of the child that reads from one gets
//! `ECONNRESET` ([`super::reset`]). Connections within the guest are whole, both ends were copied, and stay.

use std::collections::HashSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::reset;
use crate::sys;

const LISTEN: u8 = 0x0a;

/// Breaks every inherited connection to somewhere else; says how many.
pub fn reset_inherited() -> u32 {
    let mut sockets = HashSet::new();
    for (path, version) in [("/proc/net/tcp", 4), ("/proc/net/tcp6", 6)] {
        let text = fs::read_to_string(path).unwrap_or_default();
        sockets.extend(
            text.lines()
                .skip(1)
                .filter_map(|line| outside_socket(line, version)),
        );
    }
    if sockets.is_empty() {
        return 0;
    }
    // The agent's own connection is the one that this request came on.
    for inode in sockets_of("self").into_iter().map(|(_, inode)| inode) {
        sockets.remove(&inode);
    }
    let mut count = 0;
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let held: Vec<_> = sockets_of(&pid.to_string())
            .into_iter()
            .filter(|(_, inode)| sockets.contains(inode))
            .collect();
        if held.is_empty() {
            continue;
        }
        let Some(process) =
            Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
        else {
            continue;
        };
        for (fd, inode) in held {
            let broken =
                sys::take_descriptor(&process, fd).and_then(|socket| reset::connection(&socket));
            if broken.is_ok() && sockets.remove(&inode) {
                count += 1;
            }
        }
    }
    count
}

/// The sockets among the descriptors of a process, by number.
fn sockets_of(process: &str) -> Vec<(i32, u64)> {
    let entries = fs::read_dir(format!("/proc/{process}/fd"))
        .into_iter()
        .flatten()
        .flatten();
    let sockets = entries.filter_map(|entry| {
        let target = fs::read_link(entry.path()).ok()?;
        let inode = target
            .to_str()?
            .strip_prefix("socket:[")?
            .strip_suffix(']')?
            .parse()
            .ok()?;
        Some((entry.file_name().to_str()?.parse().ok()?, inode))
    });
    sockets.collect()
}

/// The socket of a line of the kernel's table, if it is connected to somewhere outside.
fn outside_socket(line: &str, version: u8) -> Option<u64> {
    let mut words = line.split_ascii_whitespace();
    let remote = words.nth(2)?;
    let state = u8::from_str_radix(words.next()?, 16).ok()?;
    let inode: u64 = words.nth(5)?.parse().ok()?;
    let (address, _port) = remote.split_once(':')?;
    let inside = match parse_address(address, version)? {
        IpAddr::V4(address) => address.is_loopback() || address.is_unspecified(),
        IpAddr::V6(address) => {
            let mapped = address
                .to_ipv4_mapped()
                .is_some_and(|address| address.is_loopback());
            address.is_loopback() || address.is_unspecified() || mapped
        }
    };
    (state != LISTEN && inode != 0 && !inside).then_some(inode)
}

/// The kernel prints addresses as words in the machine's own byte order.
fn parse_address(text: &str, version: u8) -> Option<IpAddr> {
    let word = |index: usize| {
        let digits = text.get(index * 8..index * 8 + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    if version == 4 {
        return Some(IpAddr::V4(Ipv4Addr::from(word(0)?)));
    }
    let mut octets = [0; 16];
    for index in 0..4 {
        for (to, from) in octets.iter_mut().skip(index * 4).zip(word(index)?) {
            *to = from;
        }
    }
    Some(IpAddr::V6(Ipv6Addr::from(octets)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_connections_to_elsewhere_count() {
        let line = |remote: &str, state: &str| {
            format!(
                "   1: 0F02000A:9C40 {remote}:01BB {state} 00000000:00000000 00:00000000 00000000     0        0 4242 1 0 20 4 30 10 -1"
            )
        };
        assert_eq!(outside_socket(&line("01010101", "01"), 4), Some(4242));
        assert_eq!(outside_socket(&line("0100007F", "01"), 4), None);
        assert_eq!(outside_socket(&line("00000000", "0A"), 4), None);
        let six = "0000000000000000FFFF00000100007F";
        assert_eq!(outside_socket(&line(six, "01"), 6), None);
        assert_eq!(
            outside_socket(&line("0000000000000000FFFF000001010101", "01"), 6),
            Some(4242)
        );
        assert_eq!(
            outside_socket(&line("00000000000000000000000001000000", "01"), 6),
            None
        );
    }

    proptest! {
        #[test]
        fn any_table_is_survived(line in ".*", version in prop::sample::select(vec![4u8, 6])) {
            let _ = outside_socket(&line, version);
        }
    }
}
