//! Requests of a guest: where each begins and ends, and what its head becomes.
//!
//! ```text
//!   Head ──no body──► Head
//!    ├──content-length──► Body ──all bytes──► Head
//!    └──chunked──► Size ──► Data ──► DataEnd ──► Size … ──size 0──► LastEnd ──► Head
//! ```
//!
//! The bytes come from a guest. A head is parsed and written anew, so that the upstream reads exactly what was checked
//! here. A length that two readers could understand in two ways is refused: the second reader could take a part of a
//! body for a request of its own.

use forkd_net_proto::broker::Refusal;
use forkd_types::{HeaderName, HostPort};
use zeroize::Zeroizing;

/// The longest head of a request.
pub const MAX_HEAD: usize = 64 * 1024;
const MAX_HEADERS: usize = 128;
/// The longest line with the size of a chunk, with its end.
const MAX_SIZE_LINE: usize = 18;

/// The secrets for the next request.
#[derive(Debug, Clone, Default)]
pub struct Injections {
    pub headers: Vec<Injected>,
    /// Placeholders of this sandbox. None may stand anywhere but in its own header.
    pub placeholders: Vec<String>,
}

/// One header and its secret.
#[derive(Clone)]
pub struct Injected {
    pub header: HeaderName,
    pub value: Zeroizing<String>,
    /// Only this text in the header is replaced; without one the whole header is.
    pub placeholder: Option<String>,
}

impl std::fmt::Debug for Injected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Injected({}, hidden)", self.header)
    }
}

/// Reads the requests on one connection.
#[derive(Debug)]
pub struct RequestReader {
    to: HostPort,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Head,
    Body { left: u64 },
    Size,
    Data { left: u64 },
    DataEnd,
    LastEnd,
}

impl RequestReader {
    pub fn new(to: HostPort) -> Self {
        let state = State::Head;
        Self { to, state }
    }

    /// The next byte of the guest begins a request.
    pub fn is_between_requests(&self) -> bool {
        self.state == State::Head
    }

    /// Takes bytes of the guest off `input` and appends bytes for the upstream to `output`, as far as whole parts are
    /// there. `secrets` is asked once for each request, whose number is returned.
    pub fn advance(
        &mut self,
        input: &mut Vec<u8>,
        output: &mut Vec<u8>,
        secrets: &mut dyn FnMut() -> Result<Injections, Refusal>,
    ) -> Result<u64, Refusal> {
        let mut requests = 0;
        let mut at = 0;
        loop {
            let rest = input.get(at..).unwrap_or_default();
            let before = output.len();
            let Some((taken, next)) = self.step(rest, output, secrets)? else {
                break;
            };
            requests += u64::from(self.state == State::Head && output.len() > before);
            self.state = next;
            at += taken;
        }
        input.drain(..at);
        Ok(requests)
    }

    /// One part: the bytes that it took and the state after it. `None` if it is not whole.
    fn step(
        &self,
        input: &[u8],
        output: &mut Vec<u8>,
        secrets: &mut dyn FnMut() -> Result<Injections, Refusal>,
    ) -> Result<Option<(usize, State)>, Refusal> {
        match self.state {
            State::Head => self.head(input, output, secrets),
            State::Body { left } => Ok(copied(input, output, left).map(|taken| {
                let left = left - taken as u64;
                let next = if left == 0 {
                    State::Head
                } else {
                    State::Body { left }
                };
                (taken, next)
            })),
            State::Size => {
                let Some((line, taken)) = line(input, MAX_SIZE_LINE)? else {
                    return Ok(None);
                };
                let size = chunk_size(line)?;
                output.extend_from_slice(format!("{size:x}\r\n").as_bytes());
                let next = if size == 0 {
                    State::LastEnd
                } else {
                    State::Data { left: size }
                };
                Ok(Some((taken, next)))
            }
            State::Data { left } => Ok(copied(input, output, left).map(|taken| {
                let left = left - taken as u64;
                let next = if left == 0 {
                    State::DataEnd
                } else {
                    State::Data { left }
                };
                (taken, next)
            })),
            // A line that is not empty after the last chunk is a trailer, which could stand for a header.
            State::DataEnd | State::LastEnd => {
                let Some((line, taken)) = line(input, 2)? else {
                    return Ok(None);
                };
                if !line.is_empty() {
                    return Err(Refusal::NotHttp);
                }
                output.extend_from_slice(b"\r\n");
                let last = self.state == State::LastEnd;
                Ok(Some((taken, if last { State::Head } else { State::Size })))
            }
        }
    }

    fn head(
        &self,
        input: &[u8],
        output: &mut Vec<u8>,
        secrets: &mut dyn FnMut() -> Result<Injections, Refusal>,
    ) -> Result<Option<(usize, State)>, Refusal> {
        if input.is_empty() {
            return Ok(None);
        }
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        let taken = match request.parse(input) {
            Ok(httparse::Status::Complete(taken)) if taken <= MAX_HEAD => taken,
            Ok(httparse::Status::Partial) if input.len() < MAX_HEAD => return Ok(None),
            _ => return Err(Refusal::NotHttp),
        };
        let (Some(method), Some(path), Some(1)) = (request.method, request.path, request.version)
        else {
            return Err(Refusal::NotHttp);
        };
        let head = Head {
            method,
            path,
            headers: request.headers,
        };
        let next = head.checked(&self.to)?;
        head.write(&secrets()?, output)?;
        Ok(Some((taken, next)))
    }
}

/// Copies at most `left` bytes; `None` if there are none.
fn copied(input: &[u8], output: &mut Vec<u8>, left: u64) -> Option<usize> {
    let count = usize::try_from(left).unwrap_or(usize::MAX).min(input.len());
    let part = input.get(..count).filter(|part| !part.is_empty())?;
    output.extend_from_slice(part);
    Some(count)
}

/// A line without its end, and its length with it. Only CRLF ends a line.
fn line(input: &[u8], longest: usize) -> Result<Option<(&[u8], usize)>, Refusal> {
    let window = input.get(..longest.min(input.len())).unwrap_or_default();
    match window.iter().position(|byte| *byte == b'\n') {
        Some(end) => {
            let line = window.get(..end).and_then(|line| line.strip_suffix(b"\r"));
            Ok(Some((line.ok_or(Refusal::NotHttp)?, end + 1)))
        }
        None if input.len() >= longest => Err(Refusal::NotHttp),
        None => Ok(None),
    }
}

/// The size of a chunk. Extensions are refused: some readers end a line inside one.
fn chunk_size(line: &[u8]) -> Result<u64, Refusal> {
    let digits = line.len() <= 16 && !line.is_empty() && line.iter().all(u8::is_ascii_hexdigit);
    let text = std::str::from_utf8(line).ok().filter(|_| digits);
    text.and_then(|text| u64::from_str_radix(text, 16).ok())
        .ok_or(Refusal::NotHttp)
}

struct Head<'a> {
    method: &'a str,
    path: &'a str,
    headers: &'a [httparse::Header<'a>],
}

impl Head<'_> {
    fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.headers
            .iter()
            .filter(move |header| header.name.eq_ignore_ascii_case(name))
            .map(|header| header.value)
    }

    /// The state after the head, if every part of it is clear.
    fn checked(&self, to: &HostPort) -> Result<State, Refusal> {
        if self.method == "CONNECT" || self.named("upgrade").next().is_some() {
            return Err(Refusal::Upgrade);
        }
        let own = self.path.starts_with('/') || (self.path == "*" && self.method == "OPTIONS");
        if !own {
            return Err(Refusal::WrongHost);
        }
        if !self.path.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Refusal::NotHttp);
        }
        let mut hosts = self.named("host");
        let (Some(host), None) = (hosts.next(), hosts.next()) else {
            return Err(Refusal::WrongHost);
        };
        let with_port = format!("{}:{}", to.host, to.port);
        let same = |text: &str| host.eq_ignore_ascii_case(text.as_bytes());
        if !same(to.host.as_str()) && !same(&with_port) {
            return Err(Refusal::WrongHost);
        }
        self.length()
    }

    fn length(&self) -> Result<State, Refusal> {
        let mut lengths = self.named("content-length");
        let mut codings = self.named("transfer-encoding");
        let one = (
            lengths.next(),
            lengths.next(),
            codings.next(),
            codings.next(),
        );
        match one {
            (None, None, None, None) => Ok(State::Head),
            (Some(length), None, None, None) => {
                let digits = !length.is_empty()
                    && length.len() <= 18
                    && length.iter().all(u8::is_ascii_digit);
                let text = std::str::from_utf8(length).ok().filter(|_| digits);
                match text.and_then(|text| text.parse().ok()) {
                    Some(0) => Ok(State::Head),
                    Some(left) => Ok(State::Body { left }),
                    None => Err(Refusal::NotHttp),
                }
            }
            (None, None, Some(coding), None) if coding.eq_ignore_ascii_case(b"chunked") => {
                Ok(State::Size)
            }
            _ => Err(Refusal::NotHttp),
        }
    }

    /// Writes the head with its secrets. Nothing is written if it is refused.
    fn write(&self, injections: &Injections, output: &mut Vec<u8>) -> Result<(), Refusal> {
        let strays = |bytes: &[u8]| {
            let mut placeholders = injections.placeholders.iter();
            placeholders.any(|text| find(bytes, text.as_bytes()).is_some())
        };
        if strays(self.path.as_bytes()) {
            return Err(Refusal::PlaceholderElsewhere);
        }
        let injected = |name: &str| {
            let mut all = injections.headers.iter();
            all.find(|injected| name.eq_ignore_ascii_case(injected.header.as_str()))
        };
        // A hop on the way would remove the header.
        let tokens = self
            .named("connection")
            .flat_map(|value| value.split(|byte| *byte == b','));
        for token in tokens {
            let token = String::from_utf8_lossy(token.trim_ascii());
            if injected(&token).is_some() {
                return Err(Refusal::NotHttp);
            }
        }
        let mut head = Zeroizing::new(Vec::with_capacity(1024));
        head.extend_from_slice(format!("{} {} HTTP/1.1\r\n", self.method, self.path).as_bytes());
        let mut replaced = 0;
        for header in self.headers {
            match injected(header.name) {
                Some(Injected {
                    placeholder: None, ..
                }) => {}
                Some(Injected {
                    placeholder: Some(text),
                    value,
                    ..
                }) => {
                    let at = find(header.value, text.as_bytes()).ok_or(Refusal::NoPlaceholder)?;
                    let (before, rest) = header.value.split_at(at);
                    let after = rest.get(text.len()..).unwrap_or_default();
                    if strays(after) {
                        return Err(Refusal::PlaceholderElsewhere);
                    }
                    field(&mut head, header.name, &[before, value.as_bytes(), after]);
                    replaced += 1;
                }
                None if strays(header.value) => return Err(Refusal::PlaceholderElsewhere),
                None => field(&mut head, header.name, &[header.value]),
            }
        }
        // Each placeholder exactly once: a second header of the same name could be the one that counts.
        let wanted = injections
            .headers
            .iter()
            .filter(|injected| injected.placeholder.is_some());
        if replaced != wanted.count() {
            return Err(Refusal::NoPlaceholder);
        }
        for injected in injections
            .headers
            .iter()
            .filter(|injected| injected.placeholder.is_none())
        {
            field(
                &mut head,
                injected.header.as_str(),
                &[injected.value.as_bytes()],
            );
        }
        head.extend_from_slice(b"\r\n");
        output.extend_from_slice(&head);
        Ok(())
    }
}

fn field(head: &mut Vec<u8>, name: &str, value: &[&[u8]]) {
    head.extend_from_slice(name.as_bytes());
    head.extend_from_slice(b": ");
    for part in value {
        head.extend_from_slice(part);
    }
    head.extend_from_slice(b"\r\n");
}

fn find(bytes: &[u8], text: &[u8]) -> Option<usize> {
    (!text.is_empty())
        .then(|| bytes.windows(text.len()).position(|window| window == text))
        .flatten()
}

#[cfg(test)]
mod tests;
