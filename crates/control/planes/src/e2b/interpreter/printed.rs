//! The text that an execution prints, in pieces that the SDKs show as lines.

use std::time::Duration;

use forkd_agent_client::Output;
use serde_json::{Value, json};

use super::lines::Texts;
use crate::e2b::text;

/// How long the beginning of a line waits for its rest.
const LINE_PATIENCE: Duration = Duration::from_millis(50);
/// Bytes of a line that are not held back.
const MAX_HELD: usize = 64 << 10;

fn printed(kind: &str, text: &str) -> Value {
    let now = forkd_sandboxes::clock::unix_ms();
    json!({"type": kind, "text": text, "timestamp": text::time_ms(now)})
}

/// The two outputs of an execution. A line that arrives in pieces is sent as one, unless the rest takes its time.
#[derive(Default)]
pub struct Printed {
    out: Texts,
    err: Texts,
    held: Option<(&'static str, String)>,
}

impl Printed {
    /// Takes output. Returns the text that is to be sent now.
    pub fn of(&mut self, output: Output) -> Option<Value> {
        let (kind, text) = match output {
            Output::Stdout(bytes) => ("stdout", self.out.push(&bytes)),
            Output::Stderr(bytes) => ("stderr", self.err.push(&bytes)),
            Output::Lost { .. } => return None,
        };
        let other = match &mut self.held {
            Some((held, all)) if *held == kind => {
                all.push_str(&text);
                None
            }
            held => held.replace((kind, text)),
        };
        let whole = |held: &(&str, String)| held.1.ends_with('\n') || held.1.len() >= MAX_HELD;
        if other.is_none() && self.held.as_ref().is_some_and(whole) {
            return self.rest();
        }
        other.map(|(kind, text)| printed(kind, &text))
    }

    /// The text that waits for the rest of its line.
    pub fn rest(&mut self) -> Option<Value> {
        let (kind, text) = self.held.take()?;
        Some(printed(kind, &text))
    }

    /// Waits until held text has waited long enough.
    pub async fn patience(&self) {
        match &self.held {
            Some(_) => tokio::time::sleep(LINE_PATIENCE).await,
            None => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(values: &[Option<Value>]) -> Vec<String> {
        let found = values.iter().flatten();
        found
            .map(|value| format!("{} {}", value["type"], value["text"]))
            .collect()
    }

    #[test]
    fn pieces_of_a_line_become_one() {
        let mut printed = Printed::default();
        let sent = [
            printed.of(Output::Stdout(b"a".to_vec())),
            printed.of(Output::Stdout(b"b\n".to_vec())),
            printed.of(Output::Stderr(b"e".to_vec())),
            printed.of(Output::Stdout(b"c\n".to_vec())),
            printed.rest(),
            printed.rest(),
        ];
        let expected = [r#""stdout" "ab\n""#, r#""stderr" "e""#, r#""stdout" "c\n""#];
        assert_eq!(texts(&sent), expected);
    }
}
