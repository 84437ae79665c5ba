//! The name servers of the host.

use std::io;
use std::net::{IpAddr, SocketAddr};

/// The most name servers that are asked, as in the C library.
const MAX: usize = 3;

/// The list of name servers.
pub const LIST: &str = "/etc/resolv.conf";

/// The name servers in the list of the host. A host without a list has none.
pub fn read_resolvers() -> io::Result<Vec<SocketAddr>> {
    match std::fs::read_to_string(LIST) {
        Ok(text) => Ok(parse(&text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

fn parse(text: &str) -> Vec<SocketAddr> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_ascii_whitespace();
            (words.next()? == "nameserver").then_some(())?;
            Some(SocketAddr::new(words.next()?.parse::<IpAddr>().ok()?, 53))
        })
        .take(MAX)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_read_in_their_order() {
        let text =
            "# x\nsearch a\nnameserver 127.0.0.53\nnameserver fe80::1%eth0\nnameserver ::1\n";
        let found = parse(text);
        assert_eq!(
            found,
            [
                "127.0.0.53:53".parse().unwrap(),
                "[::1]:53".parse().unwrap()
            ]
        );
    }
}
