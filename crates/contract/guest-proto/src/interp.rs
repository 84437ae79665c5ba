//! Interpreters that stay resident and keep their state between calls.

use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// Starts an interpreter, or makes sure that one of this name runs; the response is an [`InterpInfo`] and
/// comes when the warm-up is done.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InterpStart {
    /// Its name; the language when missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// `python` or `node`.
    pub language: String,
    /// The program, when it is not the usual one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// Added to the default environment.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<(String, Option<String>)>,
    /// Where to run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// A name, a number, or `uid:gid`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Runs first, and again whenever the interpreter is replaced.
    pub warmup: Warmup,
    /// Replace one that runs already.
    pub replace: bool,
    /// How long starting and warming up may take; five minutes when missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
}

/// Work of an interpreter before it is ready.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Warmup {
    /// Modules to import, each as `module` or `module as name`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub imports: Vec<String>,
    /// Code to run after them.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub code: String,
}

/// Names an interpreter, for the requests that need nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterpName {
    pub name: String,
}

/// The state of an interpreter and its history.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterpInfo {
    pub name: String,
    /// `python` or `node`.
    pub language: String,
    /// The interpreter's own version.
    #[serde(default)]
    pub version: String,
    /// The kernel's number for it; 0 when it does not run.
    #[serde(default)]
    pub pid: u32,
    pub state: InterpState,
    /// How often it was replaced.
    #[serde(default)]
    pub restarts: u64,
    /// Calls answered, the replaced ones' included.
    #[serde(default)]
    pub calls: u64,
    /// Exception of the warm-up, if it raised one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warmup_error: Option<EvalError>,
    /// Why the last one ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_death: Option<String>,
}

/// State of an interpreter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InterpState {
    /// The warm-up is under way.
    Starting,
    /// Waiting for a call.
    Ready,
    /// In a call.
    Busy,
    /// It ended and could not be replaced.
    Dead,
}

/// Runs code in an interpreter. What it prints comes on [`crate::channel::OUT`] and
/// [`crate::channel::ERR`] as it is printed; the response is an [`EvalResult`], in full on
/// [`crate::channel::BULK`] when it is too large for a frame (see [`EvalResult::bulk`]).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EvalRequest {
    /// Which interpreter; `python` when missing. One that does not run yet is started without a warm-up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interp: Option<String>,
    /// How to read the code.
    pub mode: EvalMode,
    pub code: String,
    /// The code comes on [`crate::channel::IN`] instead.
    pub code_follows: bool,
    /// Interrupt the call after this time; an interpreter that does not heed it is replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Cut printed output after this many bytes (both outputs together).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_limit: Option<u64>,
}

/// How to read code.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EvalMode {
    /// As a REPL does: run the statements; the value is that of a last expression.
    #[default]
    Auto,
    /// The code is one expression.
    Eval,
    /// Statements; there is no value.
    Exec,
}

/// The result of a call.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EvalResult {
    /// The value as the language prints it; `None` for a call without a value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repr: Option<String>,
    /// The value as JSON, where it has such a form.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub json: Option<JsonText>,
    /// Other forms of the value: an object whose keys are media types (`text/html`, `image/png` in base64, …).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub display: Option<JsonText>,
    /// The exception of the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<EvalError>,
    /// The call was interrupted because its time was over.
    pub timed_out: bool,
    /// Printed output was cut.
    pub output_truncated: bool,
    /// How long the call ran.
    pub wall_ms: u64,
    /// How many calls this interpreter has answered, this one included.
    pub count: u64,
    /// The rest is on [`crate::channel::BULK`], this many bytes of JSON of this same shape.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bulk: Option<u64>,
}

/// A JSON value that stays text. A tree of values takes up to 44 times the memory of its text, and the text comes from
/// a guest.
#[derive(Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JsonText(Box<RawValue>);

impl JsonText {
    #[must_use]
    pub fn get(&self) -> &str {
        self.0.get()
    }

    /// Reads the text into a type. For values whose size the caller knows to be small.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        serde_json::from_str(self.get())
    }
}

impl From<JsonText> for String {
    fn from(json: JsonText) -> Self {
        let text: Box<str> = json.0.into();
        text.into()
    }
}

impl fmt::Debug for JsonText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.get())
    }
}

impl PartialEq for JsonText {
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

impl Eq for JsonText {}

/// An exception in the guest's code.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EvalError {
    /// The type's name, such as `ZeroDivisionError`.
    pub name: String,
    pub message: String,
    /// The traceback as the language prints it.
    pub traceback: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_stays_text() {
        let text = r#"{"json":[[0], [1e9]],"display":{"text/html":"x"}}"#;
        let result: EvalResult = serde_json::from_str(text).unwrap();
        let json = result.json.clone().unwrap();
        assert_eq!(json.get(), "[[0], [1e9]]");
        assert_eq!(String::from(json), "[[0], [1e9]]");
        let again = serde_json::to_string(&result).unwrap();
        assert!(again.contains("[[0], [1e9]]"), "{again}");
    }
}
