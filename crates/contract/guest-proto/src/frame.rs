//! Frames on a byte stream, without any I/O.
//!
//! ```text
//!   0        4        8    9    10      12
//!   | length | stream | kind | channel | zero | payload …
//! ```
//!
//! All numbers are little-endian. The channel byte is zero where a kind has no channel.

use thiserror::Error;

/// The length of the part before the payload.
pub const HEADER: usize = 12;
/// The largest payload.
pub const MAX_PAYLOAD: usize = 256 * 1024;
/// The payload that senders of bulk bytes aim at.
pub const DATA_CHUNK: usize = 64 * 1024;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// The first frame of each side; JSON [`crate::Hello`]; stream 0.
    Hello = 1,
    /// Opens a stream; JSON [`crate::Request`].
    Request = 2,
    /// Something happened; JSON [`crate::Event`].
    Event = 3,
    /// Bulk bytes of a channel.
    Data = 4,
    /// No more bytes on a channel.
    End = 5,
    /// Credit for a channel; a 32-bit number of bytes.
    Window = 6,
    /// Towards the agent; JSON [`crate::Control`].
    Control = 7,
    /// Ends a stream; JSON [`crate::Outcome`].
    Response = 8,
}

impl Kind {
    /// The kind of this number; `None` for one that a newer peer made up.
    #[must_use]
    pub const fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Hello,
            2 => Self::Request,
            3 => Self::Event,
            4 => Self::Data,
            5 => Self::End,
            6 => Self::Window,
            7 => Self::Control,
            8 => Self::Response,
            _ => return None,
        })
    }
}

/// A message of a stream or of the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Whose it is; 0 is the connection itself.
    pub stream: u32,
    pub kind: Kind,
    /// Which channel, for kinds that have one.
    pub channel: u8,
    pub payload: Vec<u8>,
}

impl Frame {
    /// The credit of a window frame.
    #[must_use]
    pub fn credit(&self) -> Option<u32> {
        Some(u32::from_le_bytes(self.payload.get(..4)?.try_into().ok()?))
    }
}

/// The stream cannot be read any further.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// The length is over the limit.
    #[error("a frame of {length} bytes is over the limit of {MAX_PAYLOAD}")]
    TooLong {
        /// The value in the header.
        length: u32,
    },
    /// The reserved field is not zero; the peer does not speak this protocol.
    #[error("the reserved field of a frame header is {found:#06x}, not zero")]
    Reserved {
        /// The value in the header.
        found: u16,
    },
}

/// Puts a frame at the end of `out`. A payload over [`MAX_PAYLOAD`] is a mistake of the caller and is cut.
pub fn encode_into(out: &mut Vec<u8>, stream: u32, kind: Kind, channel: u8, payload: &[u8]) {
    let payload = payload.get(..MAX_PAYLOAD).unwrap_or(payload);
    out.reserve(HEADER + payload.len());
    out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    out.extend_from_slice(&stream.to_le_bytes());
    out.extend_from_slice(&[kind as u8, channel, 0, 0]);
    out.extend_from_slice(payload);
}

/// One frame as bytes.
#[must_use]
pub fn encode(stream: u32, kind: Kind, channel: u8, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + payload.len());
    encode_into(&mut out, stream, kind, channel, payload);
    out
}

/// A window frame.
#[must_use]
pub fn encode_window(stream: u32, channel: u8, credit: u32) -> Vec<u8> {
    encode(stream, Kind::Window, channel, &credit.to_le_bytes())
}

/// Makes frames of bytes, however they are cut. Holds at most one frame.
#[derive(Debug, Default)]
pub struct Decoder {
    header: [u8; HEADER],
    have: usize,
    body: Option<Body>,
    failed: Option<DecodeError>,
}

#[derive(Debug)]
struct Body {
    stream: u32,
    kind: u8,
    channel: u8,
    length: usize,
    payload: Vec<u8>,
}

impl Decoder {
    /// At the start of a stream.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes from the front of `input` until a frame is whole. Frames of a kind that this version
    /// does not know are skipped. `Ok(None)` means that all input is used up. An error is for ever.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Option<Frame>, DecodeError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        loop {
            let Some(body) = &mut self.body else {
                if !self.fill_header(input) {
                    return Ok(None);
                }
                match parse_header(&self.header) {
                    Ok(body) => self.body = Some(body),
                    Err(error) => {
                        self.failed = Some(error.clone());
                        return Err(error);
                    }
                }
                continue;
            };
            let missing = body.length - body.payload.len();
            let (now, rest) = input.split_at(missing.min(input.len()));
            body.payload.extend_from_slice(now);
            *input = rest;
            if now.len() < missing {
                return Ok(None);
            }
            if let Some(frame) = self.finish() {
                return Ok(Some(frame));
            }
        }
    }

    /// Nothing of an unfinished frame is held.
    #[must_use]
    pub fn is_between_frames(&self) -> bool {
        self.have == 0 && self.body.is_none()
    }

    fn fill_header(&mut self, input: &mut &[u8]) -> bool {
        let Some(space) = self.header.get_mut(self.have..) else {
            return false;
        };
        let (now, rest) = input.split_at(space.len().min(input.len()));
        if let Some(space) = space.get_mut(..now.len()) {
            space.copy_from_slice(now);
        }
        self.have += now.len();
        *input = rest;
        self.have == HEADER
    }

    fn finish(&mut self) -> Option<Frame> {
        self.have = 0;
        let Body {
            stream,
            kind,
            channel,
            payload,
            ..
        } = self.body.take()?;
        Some(Frame {
            stream,
            kind: Kind::from_number(kind)?,
            channel,
            payload,
        })
    }
}

fn parse_header(header: &[u8; HEADER]) -> Result<Body, DecodeError> {
    let [l0, l1, l2, l3, s0, s1, s2, s3, kind, channel, r0, r1] = *header;
    let length = u32::from_le_bytes([l0, l1, l2, l3]);
    let found = u16::from_le_bytes([r0, r1]);
    if found != 0 {
        return Err(DecodeError::Reserved { found });
    }
    let size = usize::try_from(length).unwrap_or(usize::MAX);
    if size > MAX_PAYLOAD {
        return Err(DecodeError::TooLong { length });
    }
    let stream = u32::from_le_bytes([s0, s1, s2, s3]);
    // The peer's word is not worth an allocation of its size: space grows with what really comes.
    let payload = Vec::with_capacity(size.min(4096));
    Ok(Body {
        stream,
        kind,
        channel,
        length: size,
        payload,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kinds() -> impl Strategy<Value = Kind> {
        (1u8..=8).prop_map(|number| Kind::from_number(number).unwrap())
    }

    fn frames() -> impl Strategy<Value = Vec<Frame>> {
        let frame = (
            any::<u32>(),
            kinds(),
            any::<u8>(),
            prop::collection::vec(any::<u8>(), 0..300),
        )
            .prop_map(|(stream, kind, channel, payload)| Frame {
                stream,
                kind,
                channel,
                payload,
            });
        prop::collection::vec(frame, 0..20)
    }

    fn decode_all(
        decoder: &mut Decoder,
        bytes: &[u8],
        cut: usize,
    ) -> Result<Vec<Frame>, DecodeError> {
        let mut found = Vec::new();
        for mut part in bytes.chunks(cut) {
            while let Some(frame) = decoder.next(&mut part)? {
                found.push(frame);
            }
            assert!(part.is_empty());
        }
        Ok(found)
    }

    #[test]
    fn a_length_over_the_limit_is_refused_for_ever() {
        let mut decoder = Decoder::new();
        let mut bytes = encode(1, Kind::Data, 0, b"");
        bytes[..4].copy_from_slice(&(MAX_PAYLOAD as u32 + 1).to_le_bytes());
        let expected = Err(DecodeError::TooLong {
            length: MAX_PAYLOAD as u32 + 1,
        });
        assert_eq!(decoder.next(&mut bytes.as_slice()), expected);
        assert_eq!(
            decoder.next(&mut encode(1, Kind::Data, 0, b"x").as_slice()),
            expected
        );
    }

    #[test]
    fn an_unknown_kind_is_skipped() {
        let mut bytes = encode(1, Kind::Data, 0, b"from the future");
        bytes[8] = 200;
        encode_into(&mut bytes, 2, Kind::End, 1, b"");
        let found = decode_all(&mut Decoder::new(), &bytes, 5).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].stream, found[0].kind), (2, Kind::End));
    }

    #[test]
    fn a_window_frame_carries_its_credit() {
        let bytes = encode_window(9, 2, 77_000);
        let found = decode_all(&mut Decoder::new(), &bytes, 100).unwrap();
        assert_eq!(found[0].credit(), Some(77_000));
    }

    proptest! {
        #[test]
        fn frames_survive_any_cut(frames in frames(), cut in 1usize..700) {
            let mut bytes = Vec::new();
            for frame in &frames {
                encode_into(&mut bytes, frame.stream, frame.kind, frame.channel, &frame.payload);
            }
            let mut decoder = Decoder::new();
            prop_assert_eq!(decode_all(&mut decoder, &bytes, cut).unwrap(), frames);
            prop_assert!(decoder.is_between_frames());
        }

        #[test]
        fn any_bytes_end_in_frames_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..4000), cut in 1usize..700) {
            let _ = decode_all(&mut Decoder::new(), &bytes, cut);
        }
    }
}
