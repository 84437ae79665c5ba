//! A range of addresses, written as an address and a prefix length.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use thiserror::Error;

/// All addresses that share a prefix. The bits after the prefix are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cidr {
    address: IpAddr,
    prefix: u8,
}

/// Why a text is not a range of addresses.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InvalidCidr {
    #[error("{text:?} is not an IP address")]
    Address { text: String },
    #[error("{text:?} is not a prefix length from 0 to {longest}")]
    Prefix { text: String, longest: u8 },
    #[error("{address} has bits set after its prefix of {prefix}; the range starts at {first}")]
    HostBits {
        address: IpAddr,
        prefix: u8,
        first: IpAddr,
    },
}

impl Cidr {
    /// The range of one address.
    pub fn single(address: IpAddr) -> Self {
        Self {
            address,
            prefix: longest(address),
        }
    }

    /// The range that starts at `address`.
    pub fn new(address: IpAddr, prefix: u8) -> Result<Self, InvalidCidr> {
        let longest = longest(address);
        if prefix > longest {
            return Err(InvalidCidr::Prefix {
                text: prefix.to_string(),
                longest,
            });
        }
        let first = masked(address, prefix);
        if first != address {
            return Err(InvalidCidr::HostBits {
                address,
                prefix,
                first,
            });
        }
        Ok(Self { address, prefix })
    }

    /// A range of IPv4 addresses known when the program is built. Bits after the prefix are cleared.
    pub const fn v4(octets: [u8; 4], prefix: u8) -> Self {
        let bits = u32::from_be_bytes(octets) & mask4(prefix);
        Self {
            address: IpAddr::V4(Ipv4Addr::from_bits(bits)),
            prefix,
        }
    }

    /// A range of IPv6 addresses known when the program is built. Bits after the prefix are cleared.
    pub const fn v6(segments: [u16; 8], prefix: u8) -> Self {
        let [a, b, c, d, e, f, g, h] = segments;
        let bits = Ipv6Addr::new(a, b, c, d, e, f, g, h).to_bits() & mask6(prefix);
        Self {
            address: IpAddr::V6(Ipv6Addr::from_bits(bits)),
            prefix,
        }
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        self.address.is_ipv4() == address.is_ipv4() && masked(address, self.prefix) == self.address
    }

    /// Every address of `other` is also in this range.
    pub fn covers(&self, other: &Self) -> bool {
        self.prefix <= other.prefix && self.contains(other.address)
    }

    /// The first address.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    pub fn prefix(&self) -> u8 {
        self.prefix
    }
}

const fn mask4(prefix: u8) -> u32 {
    match prefix {
        0 => 0,
        1..=31 => u32::MAX << (32 - prefix),
        _ => u32::MAX,
    }
}

const fn mask6(prefix: u8) -> u128 {
    match prefix {
        0 => 0,
        1..=127 => u128::MAX << (128 - prefix),
        _ => u128::MAX,
    }
}

fn longest(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn masked(address: IpAddr, prefix: u8) -> IpAddr {
    match address {
        IpAddr::V4(v4) => IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits() & mask4(prefix))),
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & mask6(prefix))),
    }
}

impl FromStr for Cidr {
    type Err = InvalidCidr;

    /// `203.0.113.0/24`, or one address.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| InvalidCidr::Address {
            text: address.chars().take(64).collect(),
        })?;
        let Some(prefix) = prefix else {
            return Ok(Self::single(address));
        };
        let wrong = || InvalidCidr::Prefix {
            text: prefix.chars().take(16).collect(),
            longest: longest(address),
        };
        // `u8::from_str` would accept "+8".
        if !prefix.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(wrong());
        }
        Self::new(address, prefix.parse().map_err(|_| wrong())?)
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)?;
        match self.prefix == longest(self.address) {
            true => Ok(()),
            false => write!(f, "/{}", self.prefix),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranges_contain_what_shares_their_prefix() {
        let range: Cidr = "10.1.0.0/16".parse().unwrap();
        assert!(range.contains("10.1.255.255".parse().unwrap()));
        assert!(!range.contains("10.2.0.0".parse().unwrap()));
        assert!(!range.contains("::1".parse().unwrap()));
        assert!(
            "0.0.0.0/0"
                .parse::<Cidr>()
                .unwrap()
                .contains("255.1.2.3".parse().unwrap())
        );
        assert_eq!(range, Cidr::v4([10, 1, 9, 9], 16));
        assert!(Cidr::v4([10, 0, 0, 0], 8).covers(&range));
        assert!(!range.covers(&Cidr::v4([10, 0, 0, 0], 8)));
    }

    #[test]
    fn mistakes_are_named() {
        for text in [
            "10.0.0.1/8",
            "10.0.0.0/33",
            "10.0.0.0/+8",
            "10.0.0/8",
            "x",
            "1.2.3.4/",
            "0x7f.1",
        ] {
            assert!(text.parse::<Cidr>().is_err(), "{text} was accepted");
        }
    }

    proptest! {
        #[test]
        fn a_range_reads_back_as_itself(bits: u32, prefix in 0u8..=32) {
            let range = Cidr::v4(bits.to_be_bytes(), prefix);
            prop_assert_eq!(range.to_string().parse::<Cidr>().unwrap(), range);
            prop_assert!(range.contains(IpAddr::V4(Ipv4Addr::from_bits(bits))));
        }

        #[test]
        fn a_range_of_ipv6_reads_back_as_itself(segments: [u16; 8], prefix in 0u8..=128) {
            let range = Cidr::v6(segments, prefix);
            prop_assert_eq!(range.to_string().parse::<Cidr>().unwrap(), range);
        }
    }
}
