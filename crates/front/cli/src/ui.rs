//! Output: data to stdout, messages to stderr, colour only on a terminal.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};

use serde::Serialize;

const RED: &str = "1;31";
const CYAN: &str = "1;36";
const DIM: &str = "2";

/// The output streams of one command.
#[derive(Debug, Clone, Copy)]
pub struct Ui {
    color: bool,
    json: bool,
}

impl Ui {
    /// Colour if stderr is a terminal and `NO_COLOR` is unset or empty. With `json`, failures go to stdout as JSON.
    pub fn from_env(json: bool) -> Self {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self {
            color: !refused && io::stderr().is_terminal(),
            json,
        }
    }

    /// Whether `--json` was given.
    pub fn wants_json(&self) -> bool {
        self.json
    }

    /// Writes a line of data to stdout.
    pub fn line(&self, text: impl Display) -> io::Result<()> {
        writeln!(io::stdout().lock(), "{text}")
    }

    /// Writes bytes to stdout unchanged.
    pub fn raw(&self, bytes: &[u8]) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(bytes)?;
        stdout.flush()
    }

    /// Writes a value as indented JSON to stdout.
    pub fn json(&self, value: &impl Serialize) -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(value)?;
        text.push(b'\n');
        self.raw(&text)
    }

    /// Writes a message to stderr. A closed stderr is ignored.
    pub fn talk(&self, text: impl Display) {
        let _ = writeln!(io::stderr().lock(), "{text}");
    }

    /// Writes a question to stderr, without a line feed.
    pub fn ask(&self, text: impl Display) {
        let mut stderr = io::stderr().lock();
        let _ = write!(stderr, "{text}").and_then(|()| stderr.flush());
    }

    /// Writes a dimmed message to stderr.
    pub fn aside(&self, text: impl Display) {
        self.talk(self.paint(DIM, &text.to_string()));
    }

    /// Writes `error:` with origin and causes, a blank line, and `hint:` to stderr.
    pub fn error<'a>(
        &self,
        chain: impl Iterator<Item = &'a (dyn std::error::Error + 'static)>,
        origin: Option<&str>,
        hint: Option<&str>,
    ) {
        let mut out = String::new();
        for (depth, cause) in chain.enumerate() {
            if depth == 0 {
                out.push_str(&format!("{} {cause}", self.paint(RED, "error:")));
                if let Some(origin) = origin {
                    let origin = self.paint(DIM, &format!("({origin})"));
                    out.push_str(&format!(" {origin}"));
                }
            } else {
                out.push_str(&format!("\n  caused by: {cause}"));
            }
        }
        if let Some(hint) = hint {
            out.push_str(&format!("\n\n{} {hint}", self.paint(CYAN, "hint:")));
        }
        self.talk(out);
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.color {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}
