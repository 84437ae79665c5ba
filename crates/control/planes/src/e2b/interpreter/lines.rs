//! The lines of an execution: one JSON object each, all ASCII, with the fields that the SDKs read.

use std::collections::BTreeMap;

use bytes::Bytes;
use forkd_guest_proto as guest;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// One line of a stream, with every character above ASCII escaped.
pub fn line(value: &impl Serialize) -> Bytes {
    // Keys are texts, so this does not fail.
    let text = serde_json::to_string(value).unwrap_or_else(|_| "{}".to_owned());
    let mut line = String::with_capacity(text.len() + 1);
    for character in text.chars() {
        if character < '\u{7f}' {
            line.push(character);
            continue;
        }
        for unit in character.encode_utf16(&mut [0; 2]) {
            line.push_str(&format!("\\u{unit:04x}"));
        }
    }
    line.push('\n');
    line.into()
}

/// Text that comes in pieces which may end within a character.
#[derive(Debug, Default)]
pub struct Texts {
    rest: Vec<u8>,
}

impl Texts {
    /// The text that is whole with these bytes.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.rest.extend_from_slice(bytes);
        let whole = match std::str::from_utf8(&self.rest) {
            Ok(_) => self.rest.len(),
            // The end may be the beginning of a character.
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            Err(_) => self.rest.len(),
        };
        let tail = self.rest.split_off(whole);
        let text = String::from_utf8_lossy(&self.rest).into_owned();
        self.rest = tail;
        text
    }
}

/// The fields of a result by their media types.
const FIELDS: &[(&str, &str)] = &[
    ("text/plain", "text"),
    ("text/html", "html"),
    ("text/markdown", "markdown"),
    ("image/svg+xml", "svg"),
    ("image/png", "png"),
    ("image/jpeg", "jpeg"),
    ("application/pdf", "pdf"),
    ("text/latex", "latex"),
    ("application/json", "json"),
    ("application/javascript", "javascript"),
    ("e2b/data", "data"),
    ("e2b/chart", "chart"),
];

/// The text of a value: a string without the quotes that the language prints.
fn plain(repr: &str, json: Option<&guest::JsonText>) -> String {
    let quoted = |quote: char| {
        let inner = repr.strip_prefix(quote)?.strip_suffix(quote)?;
        Some(inner).filter(|inner| !inner.contains(['\\', quote]))
    };
    match json.and_then(|json| json.parse::<String>().ok()) {
        Some(text) => text,
        None => quoted('\'').unwrap_or(repr).to_owned(),
    }
}

/// The lines for a result.
pub fn results(result: &guest::EvalResult) -> Vec<Value> {
    let mut lines = Vec::new();
    let shown: Map<String, Value> = result
        .display
        .as_ref()
        .and_then(|display| display.parse().ok())
        .unwrap_or_default();
    let mut fields = Map::new();
    if let Some(repr) = &result.repr {
        fields.insert("text".into(), plain(repr, result.json.as_ref()).into());
    }
    for (media, field) in FIELDS {
        if let Some(value) = shown.get(*media) {
            fields.insert((*field).to_owned(), value.clone());
        }
    }
    if !fields.is_empty() {
        fields.insert("type".into(), "result".into());
        fields.insert("is_main_result".into(), result.repr.is_some().into());
        fields.insert("extra".into(), json!({}));
        lines.push(Value::Object(fields));
    }
    if let Some(error) = &result.error {
        lines.push(error_line(error));
    } else if result.timed_out {
        lines.push(json!({
            "type": "error",
            "name": "TimeoutError",
            "value": "the execution took too long",
            "traceback": "",
        }));
    }
    lines
}

/// A cell of IPython, as `cells.py` describes it. Values stay text, because a tree of them takes more memory.
#[derive(Debug, Deserialize)]
pub struct Cell {
    results: Vec<Shown>,
    error: Option<guest::EvalError>,
    count: u64,
}

#[derive(Debug, Deserialize)]
struct Shown {
    data: BTreeMap<String, guest::JsonText>,
    main: bool,
}

/// A result of a cell.
#[derive(Debug, Serialize)]
struct ResultLine {
    r#type: &'static str,
    is_main_result: bool,
    extra: BTreeMap<String, guest::JsonText>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(flatten)]
    fields: BTreeMap<&'static str, guest::JsonText>,
}

impl Shown {
    /// Media types without a field of their own are extra.
    fn into_line(self) -> ResultLine {
        let (mut text, mut fields, mut extra) = (None, BTreeMap::new(), BTreeMap::new());
        for (media, value) in self.data {
            let field = FIELDS.iter().find(|(known, _)| *known == media);
            match field {
                Some((_, "text")) => {
                    let shown = value.parse::<String>().unwrap_or_default();
                    text = Some(plain(&shown, None));
                }
                Some((_, field)) => drop(fields.insert(*field, value)),
                None => drop(extra.insert(media, value)),
            }
        }
        ResultLine {
            r#type: "result",
            is_main_result: self.main,
            extra,
            text,
            fields,
        }
    }
}

impl Cell {
    /// The lines of the cell after its output.
    pub fn into_lines(self) -> Vec<Bytes> {
        let count = json!({"type": "number_of_executions", "execution_count": self.count});
        let mut lines = vec![line(&count)];
        lines.extend(
            self.results
                .into_iter()
                .map(|shown| line(&shown.into_line())),
        );
        lines.extend(self.error.as_ref().map(|error| line(&error_line(error))));
        lines
    }
}

fn error_line(error: &guest::EvalError) -> Value {
    json!({
        "type": "error",
        "name": error.name,
        "value": error.message,
        "traceback": error.traceback,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_ascii_and_mean_the_same() {
        let value = json!({"text": "é \u{2028}\u{7f}😀\n"});
        let line = line(&value);
        assert!(line.is_ascii() && line.ends_with(b"\n"));
        assert_eq!(line.iter().filter(|b| **b == b'\n').count(), 1);
        assert_eq!(serde_json::from_slice::<Value>(&line).unwrap(), value);
    }

    #[test]
    fn characters_that_are_cut_come_whole() {
        let mut texts = Texts::default();
        let bytes = "aé😀".as_bytes();
        let mut found = String::new();
        for byte in bytes {
            found += &texts.push(&[*byte]);
        }
        assert_eq!(found, "aé😀");
        assert_eq!(Texts::default().push(&[b'a', 0xff, b'b']), "a\u{fffd}b");
    }

    #[test]
    fn a_result_has_the_fields_of_the_sdks() {
        let result: guest::EvalResult = serde_json::from_str(
            r#"{"repr":"'x'","json":"x","display":{"image/png":"AA","text/html":"<b>"},"error":{"name":"E","message":"m","traceback":"t"}}"#,
        )
        .unwrap();
        let lines = results(&result);
        assert_eq!(lines[0]["text"], "x");
        assert_eq!(lines[0]["png"], "AA");
        assert_eq!(lines[0]["html"], "<b>");
        assert_eq!(lines[0]["is_main_result"], true);
        assert_eq!(lines[1]["name"], "E");
        assert_eq!(results(&guest::EvalResult::default()), [] as [Value; 0]);
    }

    #[test]
    fn a_cell_has_a_line_for_each_result() {
        let cell: Cell = serde_json::from_str(
            r#"{"results":[{"data":{"text/plain":"'a'","image/png":"AA"},"main":true},
                {"data":{"text/latex":"x","odd/type":[1]},"main":false}],
                "error":{"name":"E","message":"m","traceback":"t"},"count":3}"#,
        )
        .unwrap();
        let lines: Vec<Value> = cell
            .into_lines()
            .iter()
            .map(|line| serde_json::from_slice(line).unwrap())
            .collect();
        assert_eq!(lines[0]["execution_count"], 3);
        assert_eq!(lines[1]["text"], "a");
        assert_eq!(lines[1]["png"], "AA");
        assert_eq!(lines[1]["is_main_result"], true);
        assert_eq!(lines[2]["latex"], "x");
        assert_eq!(lines[2]["extra"]["odd/type"], json!([1]));
        assert_eq!(lines[2].get("text"), None);
        assert_eq!(lines[3]["value"], "m");
    }
}
