//! Reads `multipart/form-data` as it arrives.
//!
//! A part is passed on in pieces, so its length has no limit; headers have one. The file name of a part is a whole path, with
//! the few escapes that the SDKs write.

use bytes::{Bytes, BytesMut};
use thiserror::Error;

/// The longest header block of a part.
const MAX_HEADERS: usize = 16 << 10;
/// The longest boundary.
const MAX_BOUNDARY: usize = 200;

/// Why a body is not multipart.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Malformed {
    /// The content type has no boundary.
    #[error("the content type has no valid boundary")]
    Boundary,
    /// Other bytes after a boundary than a line end or `--`.
    #[error("a boundary is not followed by a part or by the end")]
    AfterBoundary,
    /// The headers of a part are too long.
    #[error("the headers of a part have more than {MAX_HEADERS} bytes")]
    Headers,
    /// The body ends within a part.
    #[error("the body ends within a part")]
    Short,
}

/// A piece of a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// A part begins.
    Begin {
        name: Option<String>,
        file: Option<String>,
    },
    Data(Bytes),
    /// The part is whole.
    End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Preamble,
    AfterBoundary,
    Headers,
    Content,
    Done,
}

/// The reader of one body.
#[derive(Debug)]
pub struct Multipart {
    /// The line end and dashes before the boundary, and the boundary.
    delimiter: Vec<u8>,
    buffer: BytesMut,
    state: State,
    /// The end of a part that is to be reported.
    ended: bool,
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack
        .windows(needle.len())
        .position(|window| window == needle)
}

impl Multipart {
    /// A reader for a body of this content type.
    pub fn new(content_type: &str) -> Result<Self, Malformed> {
        let boundary = content_type
            .split(';')
            .find_map(|part| part.trim().strip_prefix("boundary="))
            .map(|boundary| boundary.trim_matches('"'))
            .filter(|boundary| (1..=MAX_BOUNDARY).contains(&boundary.len()))
            .ok_or(Malformed::Boundary)?;
        Ok(Self {
            delimiter: format!("\r\n--{boundary}").into_bytes(),
            // The first boundary has no line end before it.
            buffer: BytesMut::from(&b"\r\n"[..]),
            state: State::Preamble,
            ended: false,
        })
    }

    pub fn push(&mut self, part: &[u8]) {
        self.buffer.extend_from_slice(part);
    }

    /// Checks that the body has come to its end.
    pub fn finish(&self) -> Result<(), Malformed> {
        match self.state {
            State::Done => Ok(()),
            _ => Err(Malformed::Short),
        }
    }

    /// The next piece; none if more of the body is needed.
    pub fn next_piece(&mut self) -> Result<Option<Piece>, Malformed> {
        loop {
            if std::mem::take(&mut self.ended) {
                return Ok(Some(Piece::End));
            }
            match self.state {
                State::Preamble => match self.take_content() {
                    Content::Some(_) => {}
                    Content::Boundary(_) => self.state = State::AfterBoundary,
                    Content::More => return Ok(None),
                },
                State::AfterBoundary => {
                    let Some((head, _)) = self.buffer.split_first_chunk::<2>() else {
                        return Ok(None);
                    };
                    self.state = match head {
                        b"--" => State::Done,
                        b"\r\n" => State::Headers,
                        _ => return Err(Malformed::AfterBoundary),
                    };
                    // The line end stays before the headers, so that a part without headers ends like others.
                }
                State::Headers => {
                    let Some(end) = find(&self.buffer, b"\r\n\r\n") else {
                        if self.buffer.len() > MAX_HEADERS {
                            return Err(Malformed::Headers);
                        }
                        return Ok(None);
                    };
                    if end > MAX_HEADERS {
                        return Err(Malformed::Headers);
                    }
                    let headers = self.buffer.split_to(end + 4);
                    self.state = State::Content;
                    let (name, file) = disposition(&headers);
                    return Ok(Some(Piece::Begin { name, file }));
                }
                State::Content => match self.take_content() {
                    Content::Some(bytes) => return Ok(Some(Piece::Data(bytes))),
                    Content::Boundary(bytes) => {
                        self.state = State::AfterBoundary;
                        self.ended = true;
                        if !bytes.is_empty() {
                            return Ok(Some(Piece::Data(bytes)));
                        }
                    }
                    Content::More => return Ok(None),
                },
                State::Done => {
                    self.buffer.clear();
                    return Ok(None);
                }
            }
        }
    }

    /// Takes the bytes before the next boundary, as far as they are there.
    fn take_content(&mut self) -> Content {
        if let Some(at) = find(&self.buffer, &self.delimiter) {
            let bytes = self.buffer.split_to(at).freeze();
            let _ = self.buffer.split_to(self.delimiter.len());
            return Content::Boundary(bytes);
        }
        // The end may be the beginning of a boundary.
        let sure = self.buffer.len().saturating_sub(self.delimiter.len() - 1);
        if sure == 0 {
            return Content::More;
        }
        Content::Some(self.buffer.split_to(sure).freeze())
    }
}

enum Content {
    Some(Bytes),
    Boundary(Bytes),
    More,
}

/// The name and the file name of a part.
fn disposition(headers: &[u8]) -> (Option<String>, Option<String>) {
    let headers = String::from_utf8_lossy(headers);
    let line = headers.lines().find(|line| {
        line.get(..20)
            .is_some_and(|name| name.eq_ignore_ascii_case("content-disposition:"))
    });
    let Some(line) = line else {
        return (None, None);
    };
    let (before, file) = match line.split_once("filename=\"") {
        Some((before, rest)) => {
            let end = rest.rfind('"').unwrap_or(rest.len());
            (before, rest.get(..end).map(file_name))
        }
        None => (line, None),
    };
    let name = before.split_once("name=\"").and_then(|(_, rest)| {
        let (name, _) = rest.split_once('"')?;
        Some(name.to_owned())
    });
    (name, file)
}

fn file_name(text: &str) -> String {
    text.replace("%22", "\"")
        .replace("%0A", "\n")
        .replace("%0D", "\r")
        .replace("\\\\", "\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: &str = "multipart/form-data; boundary=XX";

    /// The file name and the content of a part.
    type Part = (Option<String>, Vec<u8>);

    /// The parts of a body that arrives in pieces of this size.
    fn parts(body: &[u8], size: usize) -> Result<Vec<Part>, Malformed> {
        let mut reader = Multipart::new(KIND)?;
        let (mut found, mut whole) = (Vec::new(), Vec::new());
        for piece in body.chunks(size) {
            reader.push(piece);
            while let Some(piece) = reader.next_piece()? {
                match piece {
                    Piece::Begin { file, .. } => found.push((file, Vec::new())),
                    Piece::Data(bytes) => found.last_mut().unwrap().1.extend_from_slice(&bytes),
                    Piece::End => whole.push(()),
                }
            }
        }
        reader.finish()?;
        assert_eq!(found.len(), whole.len());
        Ok(found)
    }

    #[test]
    fn parts_are_whole_however_the_body_is_cut() {
        let body = b"--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"/a b/%22x%22\"\r\n\
Content-Type: x\r\n\r\none\r\n--X\r\n\r\n--XX\r\ncontent-disposition: form-data; name=\"file\"; filename=\"c\\\\d\"\r\n\r\n\r\n--XX--\r\n";
        for size in 1..body.len() {
            let found = parts(body, size).unwrap();
            assert_eq!(found[0].0.as_deref(), Some("/a b/\"x\""));
            assert_eq!(found[0].1, b"one\r\n--X\r\n");
            assert_eq!((found[1].0.as_deref(), found[1].1.len()), (Some("c\\d"), 0));
        }
    }

    #[test]
    fn odd_bodies_are_refused() {
        assert_eq!(
            Multipart::new("multipart/form-data").unwrap_err(),
            Malformed::Boundary
        );
        assert_eq!(parts(b"--XX\r\n\r\nx", 3), Err(Malformed::Short));
        assert_eq!(parts(b"--XXabc", 100), Err(Malformed::AfterBoundary));
        let long = [&b"--XX\r\n"[..], &vec![b'a'; MAX_HEADERS + 1]].concat();
        assert_eq!(parts(&long, 1000), Err(Malformed::Headers));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(body: Vec<u8>, size in 1usize..64) {
            let _ = parts(&body, size);
            let _ = parts(&[b"--XX\r\n".as_slice(), &body].concat(), size);
        }
    }
}
