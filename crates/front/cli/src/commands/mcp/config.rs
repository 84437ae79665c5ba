//! Configuration files of MCP clients: one entry is added, replaced or removed; everything else stays as it is.
//!
//! Files are JSON, with or without comments, or TOML. Both are edited in place, so order, comments and white space of all
//! other entries survive.

use jsonc_parser::ParseOptions;
use jsonc_parser::cst::{CstInputValue, CstRootNode};
use serde_json::{Value, json};
use thiserror::Error;
use toml_edit::{Array, DocumentMut, Item, Table};

/// How a client keeps its servers.
#[derive(Debug, Clone, Copy)]
pub enum Format {
    /// An object of the file has the servers.
    Json {
        /// Name of that object.
        key: &'static str,
        /// Value of `type` in an entry, if the client wants one.
        kind: Option<&'static str>,
    },
    /// A table of the file has the servers.
    Toml {
        /// Name of that table.
        key: &'static str,
    },
}

/// The command that a client starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Path of the program.
    pub command: String,
    /// Arguments of the program.
    pub args: Vec<String>,
    /// Variables of its environment.
    pub env: Vec<(String, String)>,
}

/// Why a configuration file cannot be changed.
#[derive(Debug, Error)]
pub enum Error {
    /// The file is not JSON.
    #[error("the file is not valid JSON")]
    Json(#[source] jsonc_parser::errors::ParseError),
    /// The file is not TOML.
    #[error("the file is not valid TOML")]
    Toml(#[source] Box<toml_edit::TomlError>),
    /// A name of the file holds something else than servers.
    #[error("{key} of the file does not hold a list of servers")]
    Shape {
        /// The name in the file.
        key: &'static str,
    },
}

/// The file with the entry; none if it has exactly this entry.
pub fn with(
    format: Format,
    text: &str,
    name: &str,
    entry: &Entry,
) -> Result<Option<String>, Error> {
    match format {
        Format::Json { key, kind } => add_json(text, key, name, &as_json(entry, kind)),
        Format::Toml { key } => add_toml(text, key, name, entry),
    }
}

/// The file without the entry; none if it does not have it.
pub fn without(format: Format, text: &str, name: &str) -> Result<Option<String>, Error> {
    match format {
        Format::Json { key, .. } => remove_json(text, key, name),
        Format::Toml { key } => remove_toml(text, key, name),
    }
}

fn as_json(entry: &Entry, kind: Option<&str>) -> Vec<(String, Value)> {
    let mut fields = Vec::new();
    if let Some(kind) = kind {
        fields.push(("type".to_owned(), json!(kind)));
    }
    fields.push(("command".to_owned(), json!(entry.command)));
    fields.push(("args".to_owned(), json!(entry.args)));
    if !entry.env.is_empty() {
        let env: serde_json::Map<_, _> = entry
            .env
            .iter()
            .map(|(name, value)| (name.clone(), json!(value)))
            .collect();
        fields.push(("env".to_owned(), Value::Object(env)));
    }
    fields
}

fn parse_json(text: &str) -> Result<CstRootNode, Error> {
    CstRootNode::parse(text, &ParseOptions::default()).map_err(Error::Json)
}

fn input(value: &Value) -> CstInputValue {
    match value {
        Value::Null => CstInputValue::Null,
        Value::Bool(value) => CstInputValue::Bool(*value),
        Value::Number(value) => CstInputValue::Number(value.to_string()),
        Value::String(value) => CstInputValue::String(value.clone()),
        Value::Array(values) => CstInputValue::Array(values.iter().map(input).collect()),
        Value::Object(values) => CstInputValue::Object(
            values
                .iter()
                .map(|(name, value)| (name.clone(), input(value)))
                .collect(),
        ),
    }
}

fn add_json(
    text: &str,
    key: &'static str,
    name: &str,
    fields: &[(String, Value)],
) -> Result<Option<String>, Error> {
    let root = parse_json(text)?;
    let top = root
        .object_value_or_create()
        .ok_or(Error::Shape { key: "the top" })?;
    let servers = top
        .object_value_or_create(key)
        .ok_or(Error::Shape { key })?;
    let wanted = Value::Object(fields.iter().cloned().collect());
    let value = CstInputValue::Object(
        fields
            .iter()
            .map(|(name, value)| (name.clone(), input(value)))
            .collect(),
    );
    match servers.get(name) {
        Some(found) if found.to_serde_value() == Some(wanted) => return Ok(None),
        Some(found) => found.set_value(value),
        None => {
            servers.append(name, value);
        }
    }
    Ok(Some(ended(root.to_string())))
}

fn remove_json(text: &str, key: &'static str, name: &str) -> Result<Option<String>, Error> {
    let root = parse_json(text)?;
    let found = root
        .object_value()
        .and_then(|top| top.object_value(key))
        .and_then(|servers| servers.get(name));
    Ok(found.map(|found| {
        found.remove();
        root.to_string()
    }))
}

/// A file ends with a line feed.
fn ended(mut text: String) -> String {
    if !text.ends_with('\n') {
        text.push('\n');
    }
    text
}

fn parse_toml(text: &str) -> Result<DocumentMut, Error> {
    text.parse().map_err(|error| Error::Toml(Box::new(error)))
}

fn add_toml(
    text: &str,
    key: &'static str,
    name: &str,
    entry: &Entry,
) -> Result<Option<String>, Error> {
    let mut document = parse_toml(text)?;
    let servers = document.entry(key).or_insert_with(|| {
        let mut servers = Table::new();
        // Without a header of its own: only the tables in it have one.
        servers.set_implicit(true);
        Item::Table(servers)
    });
    let servers = servers.as_table_like_mut().ok_or(Error::Shape { key })?;
    let mut wanted = Table::new();
    wanted.insert("command", toml_edit::value(entry.command.as_str()));
    wanted.insert(
        "args",
        toml_edit::value(entry.args.iter().map(String::as_str).collect::<Array>()),
    );
    if !entry.env.is_empty() {
        let mut env = toml_edit::InlineTable::new();
        for (name, value) in &entry.env {
            env.insert(name, value.as_str().into());
        }
        wanted.insert("env", toml_edit::value(env));
    }
    let before = document_text(text)?;
    servers.insert(name, Item::Table(wanted));
    let after = ended(document.to_string());
    Ok((same_toml(&before, &after)? == Same::No).then_some(after))
}

/// Whether two files mean the same.
#[derive(PartialEq, Eq)]
enum Same {
    Yes,
    No,
}

fn document_text(text: &str) -> Result<String, Error> {
    Ok(parse_toml(text)?.to_string())
}

fn same_toml(before: &str, after: &str) -> Result<Same, Error> {
    let value = |text: &str| {
        toml_edit::de::from_str::<Value>(text).map_err(|_| Error::Shape { key: "the file" })
    };
    Ok(if value(before)? == value(after)? {
        Same::Yes
    } else {
        Same::No
    })
}

fn remove_toml(text: &str, key: &'static str, name: &str) -> Result<Option<String>, Error> {
    let mut document = parse_toml(text)?;
    let removed = document
        .get_mut(key)
        .and_then(Item::as_table_like_mut)
        .and_then(|servers| servers.remove(name));
    Ok(removed.map(|_| document.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Format = Format::Json {
        key: "mcpServers",
        kind: None,
    };
    const CODEX: Format = Format::Toml { key: "mcp_servers" };

    fn entry() -> Entry {
        Entry {
            command: "/usr/bin/forkd".to_owned(),
            args: vec!["mcp".to_owned()],
            env: vec![("FORKD_URL".to_owned(), "http://127.0.0.1:8889".to_owned())],
        }
    }

    #[test]
    fn an_entry_is_added_once_and_removed_without_a_trace() {
        let before = "{\n  // mine\n  \"theme\": 1e3,\n  \"mcpServers\": {\n    \"other\": { \"command\": \"x\" } // keep\n  }\n}\n";
        let after = with(PLAIN, before, "forkd", &entry()).unwrap().unwrap();
        for kept in [
            "// mine",
            "1e3",
            "\"other\": { \"command\": \"x\" }",
            "// keep",
        ] {
            assert!(after.contains(kept), "{after}");
        }
        assert!(after.contains("/usr/bin/forkd") && after.contains("FORKD_URL"));
        assert!(with(PLAIN, &after, "forkd", &entry()).unwrap().is_none());
        let gone = without(PLAIN, &after, "forkd").unwrap().unwrap();
        assert!(
            !gone.contains("forkd") && gone.contains("\"other\""),
            "{gone}"
        );
        assert!(without(PLAIN, &gone, "forkd").unwrap().is_none());
        let other = Entry {
            command: "/opt/forkd".to_owned(),
            ..entry()
        };
        let changed = with(PLAIN, &after, "forkd", &other).unwrap().unwrap();
        assert!(changed.contains("/opt/forkd") && !changed.contains("/usr/bin"));
        assert!(changed.contains("\"other\""));
    }

    #[test]
    fn a_missing_file_becomes_valid_json() {
        for text in ["", "{}", "{\"a\": 1}"] {
            let made = with(PLAIN, text, "forkd", &entry()).unwrap().unwrap();
            let value: Value = serde_json::from_str(&made).unwrap();
            assert_eq!(value["mcpServers"]["forkd"]["command"], "/usr/bin/forkd");
        }
    }

    #[test]
    fn broken_files_are_refused() {
        for text in [
            "{",
            "[]",
            "{\"mcpServers\": []}",
            "\"x\"",
            "{\"mcpServers\": 1}",
        ] {
            assert!(with(PLAIN, text, "forkd", &entry()).is_err(), "{text}");
        }
        for text in ["a = ", "mcp_servers = 1", "[mcp_servers"] {
            assert!(with(CODEX, text, "forkd", &entry()).is_err(), "{text}");
        }
    }

    #[test]
    fn toml_keeps_its_comments_and_order() {
        let before =
            "# mine\nmodel = \"x\" # keep\n\n[mcp_servers.other]\ncommand = \"y\"\n\n[zz]\na = 1\n";
        let after = with(CODEX, before, "forkd", &entry()).unwrap().unwrap();
        for kept in [
            "# mine\n",
            "# keep",
            "[mcp_servers.other]\ncommand = \"y\"",
            "[zz]\na = 1",
        ] {
            assert!(after.contains(kept), "{after}");
        }
        assert!(after.contains("[mcp_servers.forkd]\n"), "{after}");
        assert!(with(CODEX, &after, "forkd", &entry()).unwrap().is_none());
        let gone = without(CODEX, &after, "forkd").unwrap().unwrap();
        assert!(!gone.contains("forkd") && gone.contains("[mcp_servers.other]"));
        let new = with(CODEX, "", "forkd", &entry()).unwrap().unwrap();
        assert!(new.starts_with("[mcp_servers.forkd]\n"), "{new}");
    }
}
