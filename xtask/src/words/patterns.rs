//! Finds unclear wording in source files, Markdown and commit subjects.
//!
//! Each [`Pattern`] is one rule of `docs/style.md` that a program can check. Code spans in backticks are not looked at,
//! and neither are tables and fenced blocks of Markdown.

use std::fmt;

use serde::Deserialize;

use super::positions;
use crate::source::SourceFile;

const MARKDOWN_COLUMNS: usize = 120;
const SENTENCE_WORDS: usize = 40;
const SUBJECT_CHARACTERS: usize = 72;

/// Spelt in pieces, so that this file does not count itself.
const PERSONS: [&str; 5] = [
    concat!("no", "body"),
    concat!("some", "body"),
    concat!("who", "ever"),
    concat!("every", "body"),
    concat!("any", "body"),
];
const IS_NONE: &str = concat!("is ", "none");
const WHAT: &str = concat!("Wh", "at ");

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// A line of a doc comment that begins with "What".
    What,
    /// One of [`PERSONS`] instead of the process, user or caller that is meant.
    Person,
    /// [`IS_NONE`] instead of "is invalid". "There is none" is fine.
    IsNone,
    /// A doc comment of one or two words: it repeats the name below it.
    ShortDoc,
    /// A Markdown line of more than [`MARKDOWN_COLUMNS`].
    LongLine,
    /// A Markdown sentence of more than [`SENTENCE_WORDS`].
    LongSentence,
    /// A commit subject of more than [`SUBJECT_CHARACTERS`], or with a semicolon.
    Subject,
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::What => "what",
            Self::Person => "person",
            Self::IsNone => "is-none",
            Self::ShortDoc => "short-doc",
            Self::LongLine => "long-line",
            Self::LongSentence => "long-sentence",
            Self::Subject => "subject",
        })
    }
}

/// Patterns in one file, each with its line (counted from 1).
pub fn in_file(file: &SourceFile) -> Vec<(usize, Pattern)> {
    if !is_checked(file) {
        return Vec::new();
    }
    let mut hits = match file.extension() {
        "rs" => doc_comments(&file.text),
        "md" => markdown(&file.text),
        _ => Vec::new(),
    };
    hits.extend(phrases(&file.text));
    hits
}

pub fn is_checked(file: &SourceFile) -> bool {
    matches!(file.extension(), "rs" | "md" | "sh" | "py" | "toml")
}

pub fn is_bad_subject(subject: &str) -> bool {
    subject.chars().count() > SUBJECT_CHARACTERS || subject.contains(';')
}

fn phrases(text: &str) -> Vec<(usize, Pattern)> {
    let mut hits = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = without_code_spans(line);
        let lower = line.to_lowercase();
        let persons = PERSONS.iter().flat_map(|word| positions(&lower, word));
        // Not in lower case: `is None` is Python.
        let invalid =
            positions(&line, IS_NONE).filter(|at| !line[..*at].to_lowercase().ends_with("there "));
        hits.extend(persons.map(|_| (index + 1, Pattern::Person)));
        hits.extend(invalid.map(|_| (index + 1, Pattern::IsNone)));
    }
    hits
}

fn doc_comments(text: &str) -> Vec<(usize, Pattern)> {
    let mut hits = Vec::new();
    // First line and number of words of the doc comment that the loop is in.
    let mut comment: Option<(usize, usize)> = None;
    for (number, line) in text.lines().map(Some).chain([None]).enumerate() {
        if let Some(doc) = line.and_then(doc_text) {
            if doc.starts_with(WHAT) {
                hits.push((number + 1, Pattern::What));
            }
            let (_, words) = comment.get_or_insert((number + 1, 0));
            *words += doc.split_whitespace().count();
        } else if let Some((first, words)) = comment.take()
            && words <= 2
        {
            hits.push((first, Pattern::ShortDoc));
        }
    }
    hits
}

fn doc_text(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let text = line
        .strip_prefix("///")
        .or_else(|| line.strip_prefix("//!"))?;
    (!text.starts_with('/')).then(|| text.trim())
}

fn markdown(text: &str) -> Vec<(usize, Pattern)> {
    let mut hits = Vec::new();
    let mut fenced = false;
    let mut paragraph: (usize, String) = (1, String::new());
    for (index, line) in text.lines().enumerate() {
        let trimmed = line.trim_start();
        let fence = trimmed.starts_with("```");
        fenced ^= fence;
        let prose = !fenced && !fence && !trimmed.starts_with('|');
        if prose && line.chars().count() > MARKDOWN_COLUMNS {
            hits.push((index + 1, Pattern::LongLine));
        }
        if !prose || trimmed.is_empty() || begins_block(trimmed) {
            hits.extend(long_sentences(&paragraph));
            paragraph = (index + 1, String::new());
        }
        if prose {
            paragraph.1.push_str(line);
            paragraph.1.push(' ');
        }
    }
    hits.extend(long_sentences(&paragraph));
    hits
}

/// Headings and list items end the sentence before them, with or without a full stop.
fn begins_block(line: &str) -> bool {
    let marker = line.split(' ').next().unwrap_or("");
    let numbered = marker
        .strip_suffix('.')
        .is_some_and(|number| number.parse::<u32>().is_ok());
    matches!(marker, "-" | "*") || numbered || line.starts_with('#')
}

fn long_sentences((line, paragraph): &(usize, String)) -> Vec<(usize, Pattern)> {
    let mut words = 0;
    let mut hits = Vec::new();
    for word in paragraph.split_whitespace() {
        words += usize::from(word.contains(char::is_alphanumeric));
        if word.ends_with(['.', '?', '!']) {
            words = 0;
        }
        // Counted once, at the first word too many.
        if words == SENTENCE_WORDS + 1 {
            hits.push((*line, Pattern::LongSentence));
        }
    }
    hits
}

fn without_code_spans(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("`")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hits(path: &str, text: &str) -> Vec<(usize, Pattern)> {
        in_file(&SourceFile {
            path: path.to_owned(),
            text: text.to_owned(),
        })
    }

    #[test]
    fn a_doc_comment_needs_a_subject_and_three_words() {
        assert_eq!(
            hits("a.rs", &format!("fn f() {{}}\n/// {WHAT}is left over.\n")),
            [(2, Pattern::What)]
        );
        assert_eq!(
            hits("a.rs", "/// Its name.\nname: u8,"),
            [(1, Pattern::ShortDoc)]
        );
        assert_eq!(
            hits(
                "a.rs",
                "/// A long first line that wraps and ends\n/// here.\n"
            ),
            []
        );
        assert_eq!(hits("a.rs", "//// no doc\n// What is no doc either\n"), []);
    }

    #[test]
    fn persons_are_counted_outside_code_spans() {
        let person = PERSONS[0];
        let text = format!("{person} reads it, `{person}` is a user, a_{person}_b a name");
        assert_eq!(hits("a.sh", &text), [(1, Pattern::Person)]);
        assert_eq!(
            hits("a.rs", &format!("// it {IS_NONE}")),
            [(1, Pattern::IsNone)]
        );
        assert_eq!(hits("a.rs", &format!("// there {IS_NONE}")), []);
    }

    #[test]
    fn long_lines_of_tables_and_code_are_not_counted() {
        let long = "word. ".repeat(30);
        assert_eq!(hits("a.md", &long), [(1, Pattern::LongLine)]);
        assert_eq!(hits("a.md", &format!("| {long} |")), []);
        assert_eq!(hits("a.md", &format!("```sh\n{long}\n```\n")), []);
    }

    #[test]
    fn a_long_sentence_is_found_over_line_ends_and_once() {
        let half = "wo ".repeat(25);
        assert_eq!(
            hits("a.md", &format!("Short.\n\n{half}\n{half}")),
            [(2, Pattern::LongSentence)]
        );
        assert_eq!(hits("a.md", &format!("{half}end.\n{half}end.")), []);
        assert_eq!(hits("a.md", &format!("- {half}\n- {half}\n1. {half}")), []);
    }

    #[test]
    fn a_subject_is_short_and_says_one_thing() {
        assert!(!is_bad_subject("store: reject a manifest without layers"));
        assert!(is_bad_subject("store: one thing; another"));
        assert!(is_bad_subject(&"a".repeat(SUBJECT_CHARACTERS + 1)));
    }
}
