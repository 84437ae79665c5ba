//! The ports on which programs of a guest listen, from the tables of its kernel.
//!
//! The guest is not trusted: tables are read up to a limit, and a line that does not have the form is skipped.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use forkd_agent_client::{Client, Error as AgentError};
use forkd_guest_proto::ErrorCode;

use crate::agent_limits;
use crate::error::Error;

/// The most bytes of a table: about 6,000 sockets.
const MAX_TABLE: usize = 1 << 20;
/// The state of a listening socket.
const LISTEN: &str = "0A";
/// Tables of TCP sockets. A guest without IPv6 lacks the second, one without /proc both.
const TABLES: [&str; 2] = ["/proc/net/tcp", "/proc/net/tcp6"];

/// The listening ports, and for each an address on which a program listens.
pub async fn list(client: &Client) -> Result<BTreeMap<u16, IpAddr>, Error> {
    let mut found = BTreeMap::new();
    for path in TABLES {
        let calls = client.by(agent_limits::answer());
        match calls.read_file(path, MAX_TABLE).await {
            Ok(table) => {
                for (port, address) in parse(&String::from_utf8_lossy(&table)) {
                    found.entry(port).or_insert(address);
                }
            }
            Err(AgentError::Agent(answer)) if answer.code == ErrorCode::NotFound => {}
            Err(error) => {
                let action = "the listening ports of the guest cannot be read";
                return Err(Error::agent(action)(error));
            }
        }
    }
    Ok(found)
}

/// The listening sockets of a table.
fn parse(table: &str) -> impl Iterator<Item = (u16, IpAddr)> {
    table.lines().filter_map(|line| {
        // sl local_address rem_address st …
        let mut words = line.split_ascii_whitespace().skip(1);
        let local = words.next()?;
        let state = words.nth(1)?;
        let (address, port) = local.split_once(':').filter(|_| state == LISTEN)?;
        Some((u16::from_str_radix(port, 16).ok()?, self::address(address)?))
    })
}

/// An address as the kernel prints it: words of 32 bits in hexadecimal digits, each in the byte order of the CPU.
fn address(digits: &str) -> Option<IpAddr> {
    let words = digits.as_bytes().chunks(8).map(|word| {
        let word = std::str::from_utf8(word)
            .ok()
            .filter(|word| word.len() == 8)?;
        Some(u32::from_str_radix(word, 16).ok()?.to_le_bytes())
    });
    let bytes = words.collect::<Option<Vec<_>>>()?.concat();
    if let Ok(v4) = <[u8; 4]>::try_from(bytes.as_slice()) {
        return Some(Ipv4Addr::from(v4).into());
    }
    let v6 = <[u8; 16]>::try_from(bytes.as_slice()).ok()?;
    Some(Ipv6Addr::from(v6).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TABLE: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid
   0: 0100007F:0BB8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0100007F:8E2C 0100007F:0BB8 01 00000000:00000000 00:00000000 00000000     0        0 2 1 0 20 4 30 10 -1
   2: 00000000000000000000000001000000:1F90 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 3 1
   3: xyz:1F91 0:0 0A
";

    #[test]
    fn listening_sockets_are_found_in_the_tables_of_the_kernel() {
        let found: Vec<_> = parse(TABLE).collect();
        let loopback = IpAddr::from(Ipv4Addr::LOCALHOST);
        let loopback6 = IpAddr::from(Ipv6Addr::LOCALHOST);
        assert_eq!(found, [(3000, loopback), (8080, loopback6)]);
    }

    proptest! {
        #[test]
        fn any_text_is_a_table(text in ".{0,400}") {
            let _ = parse(&text).count();
        }
    }
}
