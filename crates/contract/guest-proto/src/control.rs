//! Messages of the host about a stream that is under way.

use serde::{Deserialize, Serialize};

/// A message of the host about a stream that is under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "control", rename_all = "snake_case")]
pub enum Control {
    /// Give the request up. A process started by it is killed. The response still comes.
    Cancel,
    /// Send a signal to the process.
    Signal {
        signal: i32,
        /// To the whole process group.
        #[serde(default = "yes")]
        group: bool,
    },
    /// The terminal has a new size.
    Resize {
        /// Lines of the terminal.
        rows: u16,
        /// Characters per line.
        cols: u16,
    },
    /// Something a newer host made up.
    #[serde(other)]
    Unknown,
}

fn yes() -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_controls_and_fields_are_tolerated() {
        let unknown: Control = serde_json::from_str(r#"{"control":"renice","to":5}"#).unwrap();
        assert_eq!(unknown, Control::Unknown);
        let signal: Control =
            serde_json::from_str(r#"{"control":"signal","signal":2,"why":"x"}"#).unwrap();
        assert_eq!(
            signal,
            Control::Signal {
                signal: 2,
                group: true
            }
        );
    }
}
