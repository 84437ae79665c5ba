//! Packet headers.
//!
//! They are taken apart here rather than by a library because a packet may be spread over any number of
//! buffers, and a library that wants header and data each in one piece would refuse it.

/// Length of a header.
pub(super) const HEADER_LEN: usize = 44;
/// The most data in one packet.
pub(super) const MAX_DATA: usize = 64 * 1024;
/// The host's context id.
pub(super) const HOST_CID: u64 = 2;
/// The only type of socket there is.
pub(super) const TYPE_STREAM: u16 = 1;
/// Shutdown flag: will not receive any more.
pub(super) const SHUT_RECEIVE: u32 = 1;
/// Shutdown flag: will not send any more.
pub(super) const SHUT_SEND: u32 = 2;
/// Both of them.
pub(super) const SHUT_BOTH: u32 = SHUT_RECEIVE | SHUT_SEND;

/// Operation of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    Request,
    Response,
    Reset,
    Shutdown,
    Data,
    CreditUpdate,
    CreditRequest,
    Unknown,
}

impl Op {
    fn from_wire(op: u16) -> Self {
        match op {
            1 => Self::Request,
            2 => Self::Response,
            3 => Self::Reset,
            4 => Self::Shutdown,
            5 => Self::Data,
            6 => Self::CreditUpdate,
            7 => Self::CreditRequest,
            _ => Self::Unknown,
        }
    }

    fn wire(self) -> u16 {
        match self {
            Self::Unknown => 0,
            Self::Request => 1,
            Self::Response => 2,
            Self::Reset => 3,
            Self::Shutdown => 4,
            Self::Data => 5,
            Self::CreditUpdate => 6,
            Self::CreditRequest => 7,
        }
    }
}

/// A packet header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) src_cid: u64,
    pub(super) dst_cid: u64,
    pub(super) src_port: u32,
    pub(super) dst_port: u32,
    pub(super) len: u32,
    pub(super) kind: u16,
    pub(super) op: Op,
    pub(super) flags: u32,
    pub(super) buf_alloc: u32,
    pub(super) fwd_cnt: u32,
}

impl Header {
    pub(super) fn decode(bytes: &[u8; HEADER_LEN]) -> Self {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let word = |at: usize| u32::from(half(at)) | u32::from(half(at + 2)) << 16;
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Self {
            src_cid: long(0),
            dst_cid: long(8),
            src_port: word(16),
            dst_port: word(20),
            len: word(24),
            kind: half(28),
            op: Op::from_wire(half(30)),
            flags: word(32),
            buf_alloc: word(36),
            fwd_cnt: word(40),
        }
    }

    pub(super) fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &self.src_cid.to_le_bytes());
        put(8, &self.dst_cid.to_le_bytes());
        put(16, &self.src_port.to_le_bytes());
        put(20, &self.dst_port.to_le_bytes());
        put(24, &self.len.to_le_bytes());
        put(28, &self.kind.to_le_bytes());
        put(30, &self.op.wire().to_le_bytes());
        put(32, &self.flags.to_le_bytes());
        put(36, &self.buf_alloc.to_le_bytes());
        put(40, &self.fwd_cnt.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn a_header_survives(mut bytes in proptest::array::uniform32(proptest::num::u8::ANY), op in 1u8..8) {
            let mut raw = [0; HEADER_LEN];
            bytes[30] = op;
            bytes[31] = 0;
            raw[..32].copy_from_slice(&bytes);
            raw[40..].copy_from_slice(&bytes[..4]);
            proptest::prop_assert_eq!(Header::decode(&raw).encode(), raw);
        }
    }
}
