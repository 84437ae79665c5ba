//! The container: parts with a kind and a version, and a checksum over all.
//!
//! ```text
//!    8  magic "FORKDVMS"     4  format version     4  number of parts     8  length of the file
//!    2  kind    2  version    4  length    …  payload                              (repeated)
//!    4  CRC-32 of all that comes before
//! ```
//!
//! All numbers are little-endian. The file is not trusted: it is read whole, up to [`MAX_STATE`], and every
//! byte of it is accounted for.

use forkd_vmm_proto::STATE_MAGIC as MAGIC;
use thiserror::Error;

/// The version of the container.
pub use forkd_vmm_proto::STATE_FORMAT as FORMAT_VERSION;
/// The largest state file.
pub const MAX_STATE: usize = 8 << 20;
const HEADER: usize = 24;
const PART_HEADER: usize = 8;
const MAX_PARTS: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    pub kind: u16,
    /// In which version.
    pub version: u16,
    pub payload: Vec<u8>,
}

/// Why bytes are not a state file.
#[derive(Debug, Error)]
pub enum StateError {
    /// The magic is wrong.
    #[error("not a state file")]
    Magic,
    #[error("state format {found} is not {FORMAT_VERSION}")]
    Format {
        /// The format it names.
        found: u32,
    },
    /// The length differs from the header, or is over the limit.
    #[error("the state file is cut off, too long or too large")]
    Length,
    /// The checksum does not fit.
    #[error("the state file is damaged")]
    Checksum,
    /// A part that this program does not know.
    #[error("the state file has a part of kind {kind} version {version}, which is unknown here")]
    UnknownPart { kind: u16, version: u16 },
    /// A part that there must be exactly one of is missing or there twice.
    #[error("the state file has {count} parts {name:?} where {expected} belong")]
    PartCount {
        name: &'static str,
        /// How many there are.
        count: usize,
        /// How many there must be.
        expected: usize,
    },
    /// A part does not decode.
    #[error("the part {name:?} of the state file does not decode")]
    Part {
        name: &'static str,
        #[source]
        source: postcard::Error,
    },
    /// A part is longer than what it holds.
    #[error("the part {name:?} of the state file has {left} bytes too many")]
    Trailing { name: &'static str, left: usize },
    /// A part holds what cannot be.
    #[error("the part {name:?} of the state file makes no sense: {reason}")]
    Senseless {
        name: &'static str,
        reason: &'static str,
    },
    /// A part is larger than a length can say.
    #[error("the state is larger than {MAX_STATE} bytes")]
    TooLarge,
}

/// Puts parts together.
pub fn encode_parts(parts: &[Part]) -> Result<Vec<u8>, StateError> {
    let total = HEADER
        + parts
            .iter()
            .map(|p| PART_HEADER + p.payload.len())
            .sum::<usize>()
        + 4;
    if total > MAX_STATE || parts.len() > MAX_PARTS {
        return Err(StateError::TooLarge);
    }
    let mut bytes = Vec::with_capacity(total);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
    bytes.extend_from_slice(&(parts.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&(total as u64).to_le_bytes());
    for part in parts {
        bytes.extend_from_slice(&part.kind.to_le_bytes());
        bytes.extend_from_slice(&part.version.to_le_bytes());
        bytes.extend_from_slice(&(part.payload.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&part.payload);
    }
    let sum = crc32fast::hash(&bytes);
    bytes.extend_from_slice(&sum.to_le_bytes());
    Ok(bytes)
}

/// Takes parts apart.
pub fn decode_parts(bytes: &[u8]) -> Result<Vec<Part>, StateError> {
    if bytes.get(..8) != Some(MAGIC) {
        return Err(StateError::Magic);
    }
    let found = u32_at(bytes, 8)?;
    if found != FORMAT_VERSION {
        return Err(StateError::Format { found });
    }
    let count = u32_at(bytes, 12)? as usize;
    let total = u64::from(u32_at(bytes, 16)?) | u64::from(u32_at(bytes, 20)?) << 32;
    if bytes.len() > MAX_STATE || total != bytes.len() as u64 || count > MAX_PARTS {
        return Err(StateError::Length);
    }
    let body = bytes.len().checked_sub(4).ok_or(StateError::Length)?;
    if u32_at(bytes, body)? != crc32fast::hash(&bytes[..body]) {
        return Err(StateError::Checksum);
    }
    let mut at = HEADER;
    let mut parts = Vec::with_capacity(count);
    for _ in 0..count {
        let head = u32_at(bytes, at)?;
        let len = u32_at(bytes, at + 4)? as usize;
        let start = at + PART_HEADER;
        let end = start.checked_add(len).filter(|end| *end <= body);
        let payload = end
            .and_then(|end| bytes.get(start..end))
            .ok_or(StateError::Length)?;
        parts.push(Part {
            kind: head as u16,
            version: (head >> 16) as u16,
            payload: payload.to_vec(),
        });
        at = start + len;
    }
    if at != body {
        return Err(StateError::Length);
    }
    Ok(parts)
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32, StateError> {
    bytes
        .get(at..at + 4)
        .and_then(|b| b.try_into().ok())
        .map(u32::from_le_bytes)
        .ok_or(StateError::Length)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parts() -> Vec<Part> {
        vec![
            Part {
                kind: 1,
                version: 1,
                payload: vec![1, 2, 3],
            },
            Part {
                kind: 7,
                version: 2,
                payload: vec![],
            },
        ]
    }

    #[test]
    fn parts_survive() {
        let bytes = encode_parts(&parts()).unwrap();
        assert_eq!(decode_parts(&bytes).unwrap(), parts());
    }

    #[test]
    fn any_flipped_bit_and_any_cut_is_refused() {
        let bytes = encode_parts(&parts()).unwrap();
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut bad = bytes.clone();
                bad[at] ^= 1 << bit;
                assert!(decode_parts(&bad).is_err(), "byte {at} bit {bit}");
            }
            assert!(decode_parts(&bytes[..at]).is_err(), "cut at {at}");
        }
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = decode_parts(&bytes);
            let mut with_magic = MAGIC.to_vec();
            with_magic.extend(bytes);
            let _ = decode_parts(&with_magic);
        }
    }
}
