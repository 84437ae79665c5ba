//! Expansion of variables: `$NAME`, `${NAME}` and its modifiers, quotes and escapes.
//!
//! | form | value |
//! |---|---|
//! | `${A:-w}` `${A-w}` | `w` if `A` is empty or missing (with `:`) or missing |
//! | `${A:+w}` `${A+w}` | `w` if `A` is not empty (with `:`) or set |
//! | `${A:?w}` `${A?w}` | an error with the text `w` if `A` is empty or missing (with `:`) or missing |
//! | `${A#p}` `${A##p}` `${A%p}` `${A%%p}` | without the shortest or longest match of `p` at its start or end |
//! | `${A/p/w}` `${A//p/w}` | with the first match or every match of `p` replaced |

use thiserror::Error;

use crate::pattern::Pattern;
use crate::{limits, shortened, words};

/// Why a text is not expanded.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ExpandError {
    #[error("{text} is not a variable: write ${{NAME}} or a modifier such as ${{NAME:-default}}")]
    Malformed { text: String },
    #[error("variable {name}: {message}")]
    Demanded { name: String, message: String },
    #[error("the expanded text exceeds {} bytes", limits::EXPANDED_BYTES)]
    TooLarge,
    #[error("variables are nested more than {} levels deep", limits::EXPAND_DEPTH)]
    TooDeep,
}

/// The value of a variable; none if it is not set.
pub type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Expands a word and removes its quotes.
pub fn expand(text: &str, escape: char, variables: Variables<'_>) -> Result<String, ExpandError> {
    run(text, escape, variables, true, 0)
}

/// Expands the text of a here-document, in which quotes are ordinary characters.
pub(crate) fn expand_text(
    text: &str,
    escape: char,
    variables: Variables<'_>,
) -> Result<String, ExpandError> {
    run(text, escape, variables, false, 0)
}

fn run(
    text: &str,
    escape: char,
    variables: Variables<'_>,
    quotes: bool,
    depth: usize,
) -> Result<String, ExpandError> {
    if depth > limits::EXPAND_DEPTH {
        return Err(ExpandError::TooDeep);
    }
    let mut expander = Expander {
        rest: text,
        escape,
        variables,
        depth,
        out: String::new(),
    };
    expander.all(quotes)?;
    Ok(expander.out)
}

struct Expander<'a> {
    rest: &'a str,
    escape: char,
    variables: Variables<'a>,
    depth: usize,
    out: String,
}

impl Expander<'_> {
    fn next(&mut self) -> Option<char> {
        let c = self.rest.chars().next()?;
        self.rest = self.rest.get(c.len_utf8()..).unwrap_or_default();
        Some(c)
    }

    fn push(&mut self, text: &str) -> Result<(), ExpandError> {
        if self.out.len() + text.len() > limits::EXPANDED_BYTES {
            return Err(ExpandError::TooLarge);
        }
        self.out.push_str(text);
        Ok(())
    }

    fn push_char(&mut self, c: char) -> Result<(), ExpandError> {
        self.push(c.encode_utf8(&mut [0; 4]))
    }

    fn all(&mut self, quotes: bool) -> Result<(), ExpandError> {
        let mut double = false;
        while let Some(c) = self.next() {
            match c {
                '\'' if quotes && !double => {
                    let end = self.rest.find('\'').unwrap_or(self.rest.len());
                    let literal = self.rest.get(..end).unwrap_or_default().to_owned();
                    self.rest = self.rest.get(end + 1..).unwrap_or_default();
                    self.push(&literal)?;
                }
                '"' if quotes => double = !double,
                '$' => self.variable()?,
                c if c == self.escape => self.escaped(double || !quotes)?,
                c => self.push_char(c)?,
            }
        }
        Ok(())
    }

    /// Between double quotes an escape stays, unless a special character follows.
    fn escaped(&mut self, special_only: bool) -> Result<(), ExpandError> {
        let escape = self.escape;
        match self.next() {
            None => self.push_char(escape),
            Some(c) if special_only && c != '"' && c != '$' && c != escape => {
                self.push_char(escape)?;
                self.push_char(c)
            }
            Some(c) => self.push_char(c),
        }
    }

    fn variable(&mut self) -> Result<(), ExpandError> {
        if self.rest.starts_with('{') {
            let inner = self.braced()?;
            return self.modified(&inner);
        }
        let end = self
            .rest
            .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .unwrap_or(self.rest.len());
        let name = self.rest.get(..end).unwrap_or_default().to_owned();
        if !words::is_name(&name) {
            return self.push("$");
        }
        self.rest = self.rest.get(end..).unwrap_or_default();
        let value = (self.variables)(&name).unwrap_or_default();
        self.push(&value)
    }

    /// The text between `{` and the `}` that closes it.
    fn braced(&mut self) -> Result<String, ExpandError> {
        let malformed = ExpandError::Malformed {
            text: shortened(&format!("${}", self.rest)),
        };
        let (mut depth, mut skip) = (0usize, false);
        for (at, c) in self.rest.char_indices() {
            match c {
                _ if skip => skip = false,
                c if c == self.escape => skip = true,
                '{' => depth += 1,
                '}' => {
                    depth -= 1;
                    if depth == 0 {
                        let inner = self.rest.get(1..at).unwrap_or_default().to_owned();
                        self.rest = self.rest.get(at + 1..).unwrap_or_default();
                        return Ok(inner);
                    }
                }
                _ => {}
            }
        }
        Err(malformed)
    }

    fn modified(&mut self, inner: &str) -> Result<(), ExpandError> {
        let end = inner
            .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .unwrap_or(inner.len());
        let (name, modifier) = inner.split_at(end);
        let malformed = || ExpandError::Malformed {
            text: shortened(&format!("${{{inner}}}")),
        };
        if !words::is_name(name) {
            return Err(malformed());
        }
        let value = (self.variables)(name);
        if modifier.is_empty() {
            return self.push(&value.unwrap_or_default());
        }
        let inside = |text: &str| run(text, self.escape, self.variables, true, self.depth + 1);
        let (filled, operator) = match modifier.strip_prefix(':') {
            Some(rest) => (value.clone().filter(|value| !value.is_empty()), rest),
            None => (value.clone(), modifier),
        };
        let with_colon = modifier.starts_with(':');
        let result = if let Some(word) = operator.strip_prefix('-') {
            match filled {
                Some(value) => value,
                None => inside(word)?,
            }
        } else if let Some(word) = operator.strip_prefix('+') {
            match filled {
                Some(_) => inside(word)?,
                None => String::new(),
            }
        } else if let Some(word) = operator.strip_prefix('?') {
            match filled {
                Some(value) => value,
                None => return Err(demanded(name, &inside(word)?)),
            }
        } else if with_colon {
            return Err(malformed());
        } else {
            let value = value.unwrap_or_default();
            trimmed(&value, operator, &inside)?.ok_or_else(malformed)?
        };
        self.push(&result)
    }
}

fn demanded(name: &str, message: &str) -> ExpandError {
    ExpandError::Demanded {
        name: shortened(name),
        message: match message {
            "" => "not set".to_owned(),
            message => shortened(message),
        },
    }
}

/// `#`, `##`, `%`, `%%`, `/` and `//`. None if it is another modifier.
fn trimmed(
    value: &str,
    operator: &str,
    inside: &dyn Fn(&str) -> Result<String, ExpandError>,
) -> Result<Option<String>, ExpandError> {
    let pattern = |text: &str| inside(text).map(|text| Pattern::of_text(&text));
    let cuts = || {
        let ends = value.char_indices().map(|(at, _)| at);
        ends.chain([value.len()])
    };
    let (longest, rest) = match operator.as_bytes() {
        [a, b, ..] if a == b => (true, operator.get(2..).unwrap_or_default()),
        _ => (false, operator.get(1..).unwrap_or_default()),
    };
    Ok(match operator.as_bytes().first() {
        Some(b'#') => {
            let pattern = pattern(rest)?;
            let mut ends =
                cuts().filter(|at| pattern.matches(value.get(..*at).unwrap_or_default()));
            let end = if longest {
                ends.next_back()
            } else {
                ends.next()
            };
            Some(value.get(end.unwrap_or(0)..).unwrap_or_default().to_owned())
        }
        Some(b'%') => {
            let pattern = pattern(rest)?;
            let mut starts =
                cuts().filter(|at| pattern.matches(value.get(*at..).unwrap_or_default()));
            let start = if longest {
                starts.next()
            } else {
                starts.next_back()
            };
            let start = start.unwrap_or(value.len());
            Some(value.get(..start).unwrap_or_default().to_owned())
        }
        Some(b'/') => match rest.split_once('/') {
            Some((from, to)) => Some(replaced(value, &pattern(from)?, &inside(to)?, longest)?),
            None => Some(replaced(value, &pattern(rest)?, "", longest)?),
        },
        _ => None,
    })
}

/// The longest match at each place is replaced.
fn replaced(value: &str, from: &Pattern, to: &str, all: bool) -> Result<String, ExpandError> {
    let mut out = String::new();
    let mut rest = value;
    let mut done = false;
    while let Some(c) = rest.chars().next() {
        let end = match done {
            true => None,
            false => from.longest_prefix(rest).filter(|end| *end > 0),
        };
        match end {
            Some(end) => {
                out.push_str(to);
                rest = rest.get(end..).unwrap_or_default();
                done = !all;
            }
            None => {
                out.push(c);
                rest = rest.get(c.len_utf8()..).unwrap_or_default();
            }
        }
        if out.len() > limits::EXPANDED_BYTES {
            return Err(ExpandError::TooLarge);
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lookup(name: &str) -> Option<String> {
        match name {
            "A" => Some("one.two.three".into()),
            "EMPTY" => Some(String::new()),
            "SPACE" => Some("a b".into()),
            _ => None,
        }
    }

    fn of(text: &str) -> String {
        expand(text, '\\', &lookup).unwrap_or_else(|error| error.to_string())
    }

    #[test]
    fn values_defaults_and_alternatives() {
        for (text, expected) in [
            ("$A/x", "one.two.three/x"),
            ("${A}x", "one.two.threex"),
            ("$NO|${NO}|", "||"),
            ("${NO:-d}${EMPTY:-d}${EMPTY-d}${NO-d}", "ddd"),
            ("${A:+y}${EMPTY:+y}${EMPTY+y}${NO+y}", "yy"),
            ("${NO:-${NO:-$SPACE}}", "a b"),
            ("$5 $ 100%$", "$5 $ 100%$"),
            (r"\$A", "$A"),
            (r#""$SPACE" '$A' "a\b\"""#, "a b $A a\\b\""),
            ("${A:?needed}", "one.two.three"),
            ("${NO:?needed here}", "variable NO: needed here"),
            ("${NO?}", "variable NO: not set"),
        ] {
            assert_eq!(of(text), expected, "{text}");
        }
    }

    #[test]
    fn parts_are_cut_off_and_replaced() {
        for (text, expected) in [
            ("${A#*.}", "two.three"),
            ("${A##*.}", "three"),
            ("${A%.*}", "one.two"),
            ("${A%%.*}", "one"),
            ("${A#x}", "one.two.three"),
            ("${A/./-}", "one-two.three"),
            ("${A//./-}", "one-two-three"),
            ("${A//t*e/X}", "one.X"),
            ("${A/one.}", "two.three"),
        ] {
            assert_eq!(of(text), expected, "{text}");
        }
    }

    #[test]
    fn malformed_and_unbounded_texts_are_refused() {
        for text in ["${A", "${}", "${1}", "${A!x}", "${A:x}", "${-x}"] {
            let error = expand(text, '\\', &lookup).unwrap_err();
            assert!(matches!(error, ExpandError::Malformed { .. }), "{text}");
        }
        let deep = "${NO:-".repeat(20) + &"}".repeat(20);
        assert_eq!(
            expand(&deep, '\\', &lookup).unwrap_err(),
            ExpandError::TooDeep
        );
        let large = |_: &str| Some("x".repeat(limits::EXPANDED_BYTES / 2));
        assert_eq!(
            expand("$A$A$A", '\\', &large).unwrap_err(),
            ExpandError::TooLarge
        );
    }

    proptest! {
        #[test]
        fn any_text_is_expanded_or_refused(text in r#"[a-c${}:/#%?+*"'\\ -]{0,40}"#) {
            if let Ok(out) = expand(&text, '\\', &lookup) {
                prop_assert!(out.len() <= limits::EXPANDED_BYTES);
            }
        }

        #[test]
        fn text_without_special_characters_stays(text in "[a-z0-9 ./:_=-]{0,60}") {
            prop_assert_eq!(expand(&text, '\\', &lookup).unwrap(), text);
        }
    }
}
