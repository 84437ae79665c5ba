//! The host that a client names in its first bytes: the server name of a TLS hello, or the `Host` of an HTTP request.
//!
//! The bytes come from a guest. Nothing here allocates more than the bytes given, and nothing is remembered.

use forkd_types::DomainName;

/// The most bytes of a client that are looked at.
pub const MAX_FIRST_BYTES: usize = 16 * 1024;
const MAX_HEADERS: usize = 64;

/// The result of a look at the first bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peeked {
    /// The bytes end too early.
    More,
    /// Neither TLS nor HTTP.
    Other,
    /// TLS or HTTP without a valid host name.
    Hidden,
    Name(DomainName),
}

/// Looks at the first bytes.
pub fn peek(bytes: &[u8]) -> Peeked {
    match bytes.first() {
        None => Peeked::More,
        Some(0x16) => match hello(bytes) {
            Ok(found) => named(found),
            Err(Short) if bytes.len() >= MAX_FIRST_BYTES => Peeked::Hidden,
            Err(Short) => Peeked::More,
        },
        Some(first) if first.is_ascii_uppercase() => http(bytes),
        Some(_) => Peeked::Other,
    }
}

fn named(name: Option<String>) -> Peeked {
    match name.and_then(|name| name.parse().ok()) {
        Some(name) => Peeked::Name(name),
        None => Peeked::Hidden,
    }
}

/// The bytes end before the hello does.
struct Short;

/// Reads big-endian fields off the front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self, bytes: usize) -> Option<usize> {
        let taken = self.take(bytes)?;
        Some(
            taken
                .iter()
                .fold(0, |all, byte| all << 8 | usize::from(*byte)),
        )
    }

    /// A field with its length before it.
    fn vector(&mut self, bytes: usize) -> Option<Reader<'a>> {
        let len = self.number(bytes)?;
        self.take(len).map(Reader)
    }
}

/// The server name of a client hello; `None` if there is none or the hello is invalid.
fn hello(bytes: &[u8]) -> Result<Option<String>, Short> {
    let mut handshake = Vec::new();
    let mut records = Reader(bytes);
    // A hello may be cut into several records.
    loop {
        if let Some(wanted) = handshake_len(&handshake)
            && handshake.len() >= wanted
        {
            handshake.truncate(wanted);
            return Ok(server_name(&handshake));
        }
        if records.number(1).ok_or(Short)? != 0x16 {
            return Ok(None);
        }
        records.take(2).ok_or(Short)?;
        let len = records.number(2).ok_or(Short)?;
        if len == 0 {
            return Ok(None);
        }
        handshake.extend_from_slice(records.take(len).ok_or(Short)?);
        if handshake.first() != Some(&1) {
            return Ok(None);
        }
    }
}

fn handshake_len(handshake: &[u8]) -> Option<usize> {
    Some(4 + Reader(handshake.get(1..)?).number(3)?)
}

fn server_name(handshake: &[u8]) -> Option<String> {
    let mut hello = Reader(handshake);
    // Type, length, version, random.
    hello.take(4 + 2 + 32)?;
    hello.vector(1)?;
    hello.vector(2)?;
    hello.vector(1)?;
    let mut extensions = hello.vector(2)?;
    let mut found = None;
    while !extensions.0.is_empty() {
        let kind = extensions.number(2)?;
        let mut body = extensions.vector(2)?;
        if kind != 0 {
            continue;
        }
        let mut names = body.vector(2)?;
        if names.number(1)? != 0 || found.is_some() {
            return None;
        }
        let name = names.vector(2)?;
        found = Some(String::from_utf8(name.0.to_vec()).ok()?);
        // A second name could be the one that the server uses.
        if !names.0.is_empty() {
            return None;
        }
    }
    found
}

fn http(bytes: &[u8]) -> Peeked {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(httparse::Status::Partial) if bytes.len() < MAX_FIRST_BYTES => return Peeked::More,
        Ok(httparse::Status::Partial) => return Peeked::Hidden,
        Ok(httparse::Status::Complete(_)) => {}
        // The client may speak another protocol that starts with a letter.
        Err(_) if looks_like_http(bytes) => return Peeked::Hidden,
        Err(_) => return Peeked::Other,
    }
    // A request line with a whole URI, or a tunnel, could name another host than the header.
    if !request.path.is_some_and(|path| path.starts_with('/')) {
        return Peeked::Hidden;
    }
    let mut hosts = request
        .headers
        .iter()
        .filter(|header| header.name.eq_ignore_ascii_case("host"));
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return Peeked::Hidden;
    };
    let text = std::str::from_utf8(host.value).ok();
    named(text.map(|text| without_port(text.trim()).to_owned()))
}

fn looks_like_http(bytes: &[u8]) -> bool {
    let line = bytes
        .split(|byte| *byte == b'\n')
        .next()
        .unwrap_or_default();
    line.windows(6).any(|window| window == b" HTTP/")
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A client hello in records of at most `record` bytes.
    fn hello_for(name: &str, record: usize) -> Vec<u8> {
        let len16 = |bytes: &[u8]| u16::try_from(bytes.len()).unwrap().to_be_bytes().to_vec();
        let entry = [&[0][..], &len16(name.as_bytes()), name.as_bytes()].concat();
        let list = [len16(&entry), entry].concat();
        let sni = [&[0, 0][..], &len16(&list), &list].concat();
        let other = [0, 43, 0, 3, 2, 3, 4];
        let extensions = [&other[..], &sni].concat();
        let mut body = vec![3, 3];
        body.extend([7; 32]);
        body.extend([0, 0, 2, 0x13, 1, 1, 0]);
        body.extend(len16(&extensions));
        body.extend(extensions);
        let mut handshake = vec![1, 0];
        handshake.extend(len16(&body));
        handshake.extend(body);
        handshake
            .chunks(record)
            .flat_map(|part| [&[0x16, 3, 1][..], &len16(part), part].concat())
            .collect()
    }

    fn name(text: &str) -> Peeked {
        Peeked::Name(text.parse().unwrap())
    }

    #[test]
    fn the_server_name_is_found_in_any_number_of_records() {
        for record in [1, 7, 60, 4000] {
            let bytes = hello_for("a.packages.example", record);
            assert_eq!(peek(&bytes), name("a.packages.example"));
            for end in 0..bytes.len() {
                assert_eq!(peek(&bytes[..end]), Peeked::More, "{end}");
            }
        }
        assert_eq!(peek(&hello_for("10.0.0.1", 4000)), Peeked::Hidden);
        assert_eq!(peek(&hello_for("", 4000)), Peeked::Hidden);
    }

    #[test]
    fn the_host_of_a_request_is_found() {
        let request = |lines: &str| peek(format!("GET / HTTP/1.1\r\n{lines}\r\n").as_bytes());
        assert_eq!(request("Host: A.example:8080\r\n"), name("a.example"));
        assert_eq!(request("Accept: */*\r\n"), Peeked::Hidden);
        assert_eq!(
            request("Host: a.example\r\nHost: b.example\r\n"),
            Peeked::Hidden
        );
        assert_eq!(request("Host: 10.0.0.1\r\n"), Peeked::Hidden);
        assert_eq!(peek(b"GET / HT"), Peeked::More);
        assert_eq!(
            peek(b"GET http://b.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n"),
            Peeked::Hidden
        );
        assert_eq!(
            peek(b"CONNECT b.example:1 HTTP/1.1\r\nHost: a.example\r\n\r\n"),
            Peeked::Hidden
        );
        assert_eq!(peek(b"SSH-2.0-OpenSSH_9.2\r\n"), Peeked::Other);
        assert_eq!(peek(b"\x00\x01"), Peeked::Other);
        assert_eq!(peek(&[b'A'; MAX_FIRST_BYTES]), Peeked::Hidden);
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..300), tls: bool) {
            let mut bytes = bytes;
            if tls {
                bytes.splice(0..0, [0x16, 3, 1, 0, 200, 1, 0, 0, 100]);
            }
            let _ = peek(&bytes);
        }
    }
}
