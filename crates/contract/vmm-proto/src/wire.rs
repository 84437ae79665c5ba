//! Messages as packets.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thiserror::Error;

use crate::{Event, ResponseTo};

/// The largest packet either side sends or takes.
pub const MAX_MESSAGE: usize = 64 * 1024;

/// A message from the VMM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromVmm {
    Response(ResponseTo),
    Event(Event),
}

/// Why a packet is not a message.
#[derive(Debug, Error)]
pub enum WireError {
    /// The packet is larger than any message.
    #[error("a message of {len} bytes is over the limit of {MAX_MESSAGE}")]
    TooLarge { len: usize },
    /// The bytes do not decode.
    #[error("the packet does not decode as a message")]
    Malformed(#[source] postcard::Error),
    /// Bytes were left over.
    #[error("{left} bytes are left over after the message")]
    Trailing { left: usize },
}

/// Encodes a message.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, WireError> {
    let bytes = postcard::to_stdvec(message).map_err(WireError::Malformed)?;
    if bytes.len() > MAX_MESSAGE {
        return Err(WireError::TooLarge { len: bytes.len() });
    }
    Ok(bytes)
}

/// Decodes a packet, all of it.
pub fn decode<T: DeserializeOwned>(packet: &[u8]) -> Result<T, WireError> {
    if packet.len() > MAX_MESSAGE {
        return Err(WireError::TooLarge { len: packet.len() });
    }
    let (message, rest) = postcard::take_from_bytes(packet).map_err(WireError::Malformed)?;
    if !rest.is_empty() {
        return Err(WireError::Trailing { left: rest.len() });
    }
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Command, Request};

    #[test]
    fn a_message_survives_the_wire() {
        let request = Request {
            seq: 7,
            command: Command::Hello { version: 1 },
        };
        assert_eq!(
            decode::<Request>(&encode(&request).unwrap()).unwrap(),
            request
        );
    }

    #[test]
    fn leftovers_are_an_error() {
        let mut bytes = encode(&Request {
            seq: 1,
            command: Command::Pause,
        })
        .unwrap();
        bytes.push(0);
        assert!(matches!(
            decode::<Request>(&bytes),
            Err(WireError::Trailing { left: 1 })
        ));
    }

    proptest::proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..512)) {
            let _ = decode::<Request>(&bytes);
            let _ = decode::<FromVmm>(&bytes);
        }
    }
}
