//! The greeting of a client on the host: `CONNECT <port>\n`, answered with `OK <port>\n`.

use std::io;
use std::os::unix::net::UnixStream;

use rustix::net::RecvFlags;

/// The longest greeting: the word, a space, ten digits and the end of the line.
const MAX_GREETING: usize = 32;

/// Result of reading a greeting.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    /// The client wants this port.
    Port(u32),
    /// Not all of it is there yet.
    Incomplete,
    /// The greeting is invalid, or the client has closed its end.
    Bad,
}

/// The part of a greeting that has come.
#[derive(Debug, Default)]
pub(super) struct Greeter {
    line: Vec<u8>,
}

impl Greeter {
    /// Takes the greeting, or the part of it that is there, and not a byte more.
    pub(super) fn read(&mut self, stream: &UnixStream) -> Greeting {
        let mut bytes = [0; MAX_GREETING];
        let room = MAX_GREETING.saturating_sub(self.line.len());
        let peeked = match rustix::net::recv(stream, &mut bytes[..room], RecvFlags::PEEK) {
            Ok((count, _)) => count.min(room),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Greeting::Incomplete,
            Err(_) => return Greeting::Bad,
        };
        let end = bytes[..peeked].iter().position(|byte| *byte == b'\n');
        let wanted = end.map_or(peeked, |end| end + 1);
        let taken = match rustix::net::recv(stream, &mut bytes[..wanted], RecvFlags::empty()) {
            Ok((count, _)) => count.min(wanted),
            Err(_) => return Greeting::Bad,
        };
        if taken == 0 || taken != wanted {
            return Greeting::Bad;
        }
        self.line.extend_from_slice(&bytes[..taken]);
        match self.line.strip_suffix(b"\n") {
            Some(line) => parse(line).map_or(Greeting::Bad, Greeting::Port),
            None if self.line.len() < MAX_GREETING => Greeting::Incomplete,
            None => Greeting::Bad,
        }
    }
}

fn parse(line: &[u8]) -> Option<u32> {
    let digits = line.strip_prefix(b"CONNECT ")?;
    let digits = digits.strip_suffix(b"\r").unwrap_or(digits);
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Tells the client that it has its stream.
pub(super) fn accept(mut stream: &UnixStream, port: u32) -> io::Result<()> {
    use std::io::Write;
    // The first bytes into an empty socket fit.
    stream.write_all(format!("OK {port}\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    fn greet(text: &[u8]) -> Greeting {
        let (mut client, server) = UnixStream::pair().unwrap();
        server.set_nonblocking(true).unwrap();
        client.write_all(text).unwrap();
        Greeter::default().read(&server)
    }

    #[test]
    fn only_a_greeting_is_one() {
        assert_eq!(greet(b"CONNECT 1024\n"), Greeting::Port(1024));
        assert_eq!(greet(b"CONNECT 4294967295\r\n"), Greeting::Port(u32::MAX));
        assert_eq!(greet(b"CONN"), Greeting::Incomplete);
        assert_eq!(greet(b"CONNECT 10"), Greeting::Incomplete);
        for bad in [
            &b"CONNECT 4294967296\n"[..],
            b"CONNECT \n",
            b"CONNECT -1\n",
            b"CONNECT +1\n",
            b"connect 1\n",
            b"GET / HTTP/1.1\r\n",
            b"CONNECT 00000000000000000000000000000000001\n",
            b"\n",
        ] {
            assert_eq!(greet(bad), Greeting::Bad, "{bad:?}");
        }
    }

    #[test]
    fn a_greeting_may_come_in_pieces() {
        let (mut client, server) = UnixStream::pair().unwrap();
        server.set_nonblocking(true).unwrap();
        let mut greeter = Greeter::default();
        for byte in b"CONNECT 12" {
            client.write_all(&[*byte]).unwrap();
            assert_eq!(greeter.read(&server), Greeting::Incomplete);
            assert_eq!(greeter.read(&server), Greeting::Incomplete);
        }
        client.write_all(b"\n").unwrap();
        assert_eq!(greeter.read(&server), Greeting::Port(12));
    }

    #[test]
    fn what_follows_the_greeting_is_left_for_the_guest() {
        let (mut client, mut server) = UnixStream::pair().unwrap();
        client.write_all(b"CONNECT 7\nhello").unwrap();
        assert_eq!(Greeter::default().read(&server), Greeting::Port(7));
        drop(client);
        let mut rest = String::new();
        server.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "hello");
    }
}
