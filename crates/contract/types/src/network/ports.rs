//! A set of ports.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use thiserror::Error;

/// The most ranges in one set.
const MAX_PORT_RANGES: usize = 16;

/// Ports as a list of ranges: `*`, `443`, `80,443,8000-8100`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PortSet {
    /// Sorted, without overlap. Empty stands for every port.
    ranges: Vec<RangeInclusive<u16>>,
}

/// Why a text is not a set of ports.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InvalidPorts {
    #[error("{text:?} is not a port from 1 to 65535, a range such as 8000-8100, or *")]
    Port { text: String },
    #[error("the range {first}-{last} ends before it starts")]
    Backwards { first: u16, last: u16 },
    #[error("a rule names at most {MAX_PORT_RANGES} ports or ranges")]
    TooMany,
}

impl PortSet {
    pub fn all() -> Self {
        Self { ranges: Vec::new() }
    }

    pub fn is_all(&self) -> bool {
        self.ranges.is_empty()
    }

    pub fn contains(&self, port: u16) -> bool {
        self.is_all() || self.ranges.iter().any(|range| range.contains(&port))
    }

    /// Sorts the ranges and joins those that touch, so that equal sets are equal values.
    fn normal(mut ranges: Vec<RangeInclusive<u16>>) -> Self {
        ranges.sort_by_key(|range| *range.start());
        let mut joined: Vec<RangeInclusive<u16>> = Vec::with_capacity(ranges.len());
        for range in ranges {
            match joined.last_mut() {
                Some(last) if u32::from(*range.start()) <= u32::from(*last.end()) + 1 => {
                    *last = *last.start()..=(*last.end()).max(*range.end());
                }
                _ => joined.push(range),
            }
        }
        Self { ranges: joined }
    }
}

fn port(text: &str) -> Result<u16, InvalidPorts> {
    let wrong = || InvalidPorts::Port {
        text: text.chars().take(32).collect(),
    };
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(wrong());
    }
    match text.parse() {
        Ok(0) | Err(_) => Err(wrong()),
        Ok(port) => Ok(port),
    }
}

impl FromStr for PortSet {
    type Err = InvalidPorts;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "*" {
            return Ok(Self::all());
        }
        let mut ranges = Vec::new();
        for part in text.split(',') {
            if ranges.len() == MAX_PORT_RANGES {
                return Err(InvalidPorts::TooMany);
            }
            let (first, last) = match part.split_once('-') {
                Some((first, last)) => (port(first)?, port(last)?),
                None => (port(part)?, port(part)?),
            };
            if last < first {
                return Err(InvalidPorts::Backwards { first, last });
            }
            ranges.push(first..=last);
        }
        Ok(Self::normal(ranges))
    }
}

impl fmt::Display for PortSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_all() {
            return f.write_str("*");
        }
        for (index, range) in self.ranges.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            match range.start() == range.end() {
                true => write!(f, "{}", range.start())?,
                false => write!(f, "{}-{}", range.start(), range.end())?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_joined() {
        let set: PortSet = "443,80,81-90,85-100".parse().unwrap();
        assert_eq!(set.to_string(), "80-100,443");
        assert!(set.contains(100) && !set.contains(101));
        assert!("65535,1-65535".parse::<PortSet>().unwrap().contains(65535));
        for text in ["", "0", "65536", "80-", "9-8", "+80", "80,,81", "a"] {
            assert!(text.parse::<PortSet>().is_err(), "{text:?} was accepted");
        }
        let many = vec!["1"; MAX_PORT_RANGES + 1].join(",");
        assert_eq!(many.parse::<PortSet>(), Err(InvalidPorts::TooMany));
    }

    proptest::proptest! {
        #[test]
        fn a_set_reads_back_as_itself(pairs in proptest::collection::vec((1u16.., 0u16..200), 1..16), probe: u16) {
            let text: Vec<String> = pairs
                .iter()
                .map(|(first, more)| format!("{first}-{}", first.saturating_add(*more)))
                .collect();
            let set: PortSet = text.join(",").parse().unwrap();
            proptest::prop_assert_eq!(&set.to_string().parse::<PortSet>().unwrap(), &set);
            let inside = pairs.iter().any(|(first, more)| (*first..=first.saturating_add(*more)).contains(&probe));
            proptest::prop_assert_eq!(set.contains(probe), inside);
        }
    }
}
