//! Messages of the agent about a stream.

use serde::{Deserialize, Serialize};

use crate::{AgentError, Entry, FileInfo, Started, WatchEvent};

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome<T> {
    /// It was carried out.
    Ok(T),
    /// It was not.
    Error(AgentError),
}

impl<T> From<Result<T, AgentError>> for Outcome<T> {
    fn from(result: Result<T, AgentError>) -> Self {
        match result {
            Ok(value) => Self::Ok(value),
            Err(error) => Self::Error(error),
        }
    }
}

impl<T> From<Outcome<T>> for Result<T, AgentError> {
    fn from(outcome: Outcome<T>) -> Self {
        match outcome {
            Outcome::Ok(value) => Ok(value),
            Outcome::Error(error) => Err(error),
        }
    }
}

/// A message of the agent while a request is carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The process runs.
    Started(Started),
    /// Output was lost because the host did not take it in time.
    Lost {
        /// On which channel.
        channel: u8,
        /// How many bytes.
        bytes: u64,
    },
    /// The file that is about to be read.
    File(FileInfo),
    /// Part of a listing.
    Entries { entries: Vec<Entry> },
    /// Changes below a watched path.
    Changes {
        /// The changes, in order.
        changes: Vec<WatchEvent>,
    },
    /// A watch is in place: whatever happens from now on is reported.
    Watching,
    /// A dialled connection stands.
    Connected,
    /// Something a newer agent made up.
    #[serde(other)]
    Unknown,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorCode;

    #[test]
    fn outcomes_have_the_documented_shape() {
        let ok: Outcome<u32> = Outcome::Ok(7);
        assert_eq!(serde_json::to_string(&ok).unwrap(), r#"{"ok":7}"#);
        let error: Outcome<u32> = Outcome::Error(AgentError::new(ErrorCode::Busy, "b"));
        assert_eq!(
            serde_json::to_string(&error).unwrap(),
            r#"{"error":{"code":"busy","message":"b"}}"#
        );
    }

    #[test]
    fn an_event_of_the_future_is_read() {
        let event: Event = serde_json::from_str(r#"{"event":"eclipse","at":1}"#).unwrap();
        assert_eq!(event, Event::Unknown);
    }
}
