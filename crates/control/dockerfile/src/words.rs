//! Words of an instruction: quotes, the JSON form, and `NAME=VALUE` lists.

use crate::{Problem, shortened};

/// Splits at white space that is neither quoted nor escaped. An open quote lasts to the end. Quotes and escapes stay in
/// the words: they are removed when variables are expanded.
pub fn split(text: &str, escape: char) -> Vec<String> {
    let mut all = Vec::new();
    let mut word = String::new();
    let mut quote = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match quote {
            None if c.is_whitespace() => {
                if !word.is_empty() {
                    all.push(std::mem::take(&mut word));
                }
                continue;
            }
            None if c == '"' || c == '\'' => quote = Some(c),
            Some(open) if c == open => quote = None,
            _ => {}
        }
        word.push(c);
        // Nothing is escaped between single quotes.
        if c == escape && quote != Some('\'') {
            word.extend(chars.next());
        }
    }
    if !word.is_empty() {
        all.push(word);
    }
    all
}

/// The JSON form of an instruction. Text that is no array of strings is in the shell form.
pub fn json(text: &str) -> Option<Vec<String>> {
    if !text.starts_with('[') {
        return None;
    }
    serde_json::from_str(text).ok()
}

/// `NAME=VALUE …`, or the older `NAME VALUE`. Quotes stay in the values.
pub fn pairs(text: &str, escape: char) -> Result<Vec<(String, String)>, Problem> {
    let words = split(text, escape);
    let first = words
        .first()
        .ok_or_else(|| Problem::invalid("a name is missing"))?;
    if !first.contains('=') {
        let (name, value) = text
            .split_once(|c: char| c.is_whitespace())
            .ok_or_else(|| Problem::invalid(format!("{} has no value", shortened(first))))?;
        return Ok(vec![(name.to_owned(), value.trim().to_owned())]);
    }
    words
        .iter()
        .map(|word| match word.split_once('=') {
            Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
            _ => Err(Problem::invalid(format!(
                "{} is not NAME=VALUE",
                shortened(word)
            ))),
        })
        .collect()
}

/// Whether a text can be the name of a variable.
pub fn is_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    bytes
        .next()
        .is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_hold_words_together() {
        let text = r#"a "b c" 'd "e' f\ g"#;
        assert_eq!(split(text, '\\'), ["a", "\"b c\"", "'d \"e'", "f\\ g"]);
    }

    #[test]
    fn both_forms_of_pairs() {
        let one = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(
            pairs("A=1 B=\"x y\"", '\\').unwrap(),
            [one("A", "1"), one("B", "\"x y\"")]
        );
        assert_eq!(pairs("A  b c", '\\').unwrap(), [one("A", "b c")]);
        assert!(pairs("A", '\\').is_err() && pairs("A=1 B", '\\').is_err());
        assert!(pairs("", '\\').is_err() && pairs("=x", '\\').is_err());
    }

    #[test]
    fn only_arrays_of_strings_are_json() {
        assert_eq!(json(r#"["a", "b"]"#).unwrap(), ["a", "b"]);
        for text in [r#"["a", 1]"#, "[a]", "a", "[] x"] {
            assert_eq!(json(text), None, "{text}");
        }
    }
}
