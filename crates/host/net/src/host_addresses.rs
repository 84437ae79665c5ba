//! The addresses of the host, which guests reach only if a rule names them.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::FileExt;

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
}

/// The tables of the kernel for the network namespace of this process. They stay open, because a confined engine opens
/// no path of `/proc`.
#[derive(Debug)]
pub struct HostTables {
    ipv4: File,
    /// Missing on a host without IPv6.
    ipv6: Option<File>,
}

impl HostTables {
    pub fn open() -> io::Result<Self> {
        Ok(Self {
            ipv4: File::open("/proc/net/fib_trie")?,
            ipv6: File::open("/proc/net/if_inet6").ok(),
        })
    }

    /// The addresses of the host now.
    pub fn read(&self) -> io::Result<HostAddresses> {
        let mut addresses = local_ipv4(&read_again(&self.ipv4)?);
        if let Some(file) = &self.ipv6 {
            addresses.extend(read_again(file)?.lines().filter_map(ipv6_of));
        }
        Ok(HostAddresses(addresses))
    }
}

/// The text of a table from its start. The kernel makes the text anew when it is read from there.
fn read_again(file: &File) -> io::Result<String> {
    let mut text = Vec::new();
    let mut part = vec![0; 16 * 1024];
    loop {
        let len = file.read_at(&mut part, text.len() as u64)?;
        if len == 0 {
            return Ok(String::from_utf8_lossy(&text).into_owned());
        }
        text.extend_from_slice(part.get(..len).unwrap_or_default());
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
        let tables = HostTables::open().unwrap();
        for _ in 0..2 {
            let found = tables.read().unwrap();
            assert!(found.contains("127.0.0.1".parse().unwrap()));
        }
    }
}
