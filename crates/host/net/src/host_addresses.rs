//! The addresses of the host, which guests reach only if a rule names them.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A snapshot of the addresses of every interface of the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostAddresses(BTreeSet<IpAddr>);

impl HostAddresses {
    pub fn of(addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        Self(addresses.into_iter().collect())
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address)
    }

    /// Reads the tables of the kernel for the network namespace of this process.
    pub fn read() -> io::Result<Self> {
        let mut addresses = local_ipv4(&std::fs::read_to_string("/proc/net/fib_trie")?);
        // The file is missing on a host without IPv6.
        if let Ok(text) = std::fs::read_to_string("/proc/net/if_inet6") {
            addresses.extend(text.lines().filter_map(ipv6_of));
        }
        Ok(Self(addresses))
    }
}

/// Addresses in the routing table that the host delivers to itself: a line with the address, then `/32 host LOCAL`.
fn local_ipv4(text: &str) -> BTreeSet<IpAddr> {
    let mut found = BTreeSet::new();
    let mut last: Option<Ipv4Addr> = None;
    for line in text.lines() {
        if let Some((_, address)) = line.split_once("|-- ") {
            last = address.trim().parse().ok();
        } else if line.trim() == "/32 host LOCAL" {
            found.extend(last.map(IpAddr::V4));
        }
    }
    found
}

/// A line of `/proc/net/if_inet6` starts with 32 hexadecimal digits.
fn ipv6_of(line: &str) -> Option<IpAddr> {
    let bits = u128::from_str_radix(line.get(..32)?, 16).ok()?;
    Some(IpAddr::V6(Ipv6Addr::from_bits(bits)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_the_kernel_are_read() {
        let table = "Local:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.1.2.3\n        /32 host LOCAL\n     |-- 10.1.2.255\n        /32 link BROADCAST\n";
        let found = local_ipv4(table);
        assert_eq!(found, BTreeSet::from(["10.1.2.3".parse().unwrap()]));
        assert_eq!(
            ipv6_of("fe800000000000000000000000000001 02 40 20 80 eth0"),
            Some("fe80::1".parse().unwrap())
        );
        assert_eq!(ipv6_of("x"), None);
        assert!(
            HostAddresses::read()
                .unwrap()
                .contains("127.0.0.1".parse().unwrap())
        );
    }
}
