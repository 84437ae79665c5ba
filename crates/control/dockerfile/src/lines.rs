//! From text to logical lines: directives, comments, continued lines and here-documents.

use crate::words;
use crate::{ParseError, Problem, limits};

/// One instruction as it was written, without its line breaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Logical {
    /// The first line, from 1.
    pub line: u32,
    /// The instruction in capitals.
    pub name: String,
    /// The text behind the name.
    pub rest: String,
    pub heredocs: Vec<Heredoc>,
}

/// Text that follows an instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heredoc {
    /// The word that ends the text, without quotes.
    pub name: String,
    /// Whether variables are expanded: the word has no quotes.
    pub expand: bool,
    /// `<<-`: tabs at the start of lines are removed.
    pub strip_tabs: bool,
    /// The text, with the line break behind its last line.
    pub content: String,
}

/// Every logical line, and the escape character.
pub fn split(text: &str) -> Result<(Vec<Logical>, char), ParseError> {
    if text.len() > limits::FILE_BYTES {
        return Err(Problem::TooLarge {
            what: "the Dockerfile",
            limit: limits::FILE_BYTES,
        }
        .at(1));
    }
    if text.contains('\0') {
        return Err(Problem::invalid("the file holds a zero byte").at(1));
    }
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let escape = escape_directive(text)?;
    let mut reader = Reader {
        lines: text.lines().enumerate().peekable(),
        escape,
    };
    let mut all = Vec::new();
    while let Some(logical) = reader.next_logical()? {
        if all.len() >= limits::INSTRUCTIONS {
            return Err(Problem::TooLarge {
                what: "the number of instructions",
                limit: limits::INSTRUCTIONS,
            }
            .at(logical.line));
        }
        all.push(logical);
    }
    Ok((all, escape))
}

/// `# escape=X` counts only above everything but other directives.
fn escape_directive(text: &str) -> Result<char, ParseError> {
    for (number, line) in (1..).zip(text.lines()) {
        let Some((key, value)) = line
            .trim()
            .strip_prefix('#')
            .and_then(|rest| rest.split_once('='))
        else {
            break;
        };
        let key = key.trim().to_ascii_lowercase();
        if key.is_empty() || !key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
            break;
        }
        if key == "escape" {
            return match value.trim() {
                "\\" => Ok('\\'),
                "`" => Ok('`'),
                _ => Err(Problem::invalid("escape is \\ or `").at(number)),
            };
        }
        if !["syntax", "check"].contains(&key.as_str()) {
            break;
        }
    }
    Ok('\\')
}

struct Reader<'a> {
    lines: std::iter::Peekable<std::iter::Enumerate<std::str::Lines<'a>>>,
    escape: char,
}

impl Reader<'_> {
    fn next_logical(&mut self) -> Result<Option<Logical>, ParseError> {
        let mut joined = String::new();
        let mut first = None;
        for (index, line) in self.lines.by_ref() {
            let trimmed = line.trim_start();
            // Comments and empty lines may stand between the parts of an instruction.
            if trimmed.is_empty() || trimmed.starts_with('#') {
                continue;
            }
            let number = u32::try_from(index + 1).unwrap_or(u32::MAX);
            first.get_or_insert(number);
            let part = if joined.is_empty() { trimmed } else { line };
            match part.trim_end().strip_suffix(self.escape) {
                Some(part) => joined.push_str(part),
                None => {
                    joined.push_str(part);
                    break;
                }
            }
        }
        let Some(line) = first else { return Ok(None) };
        let joined = joined.trim();
        let (name, rest) = joined
            .split_once(|c: char| c.is_whitespace())
            .unwrap_or((joined, ""));
        let mut logical = Logical {
            line,
            name: name.to_ascii_uppercase(),
            rest: rest.trim().to_owned(),
            heredocs: Vec::new(),
        };
        if ["RUN", "COPY", "ADD"].contains(&logical.name.as_str()) {
            logical.heredocs = self.heredocs(&logical)?;
        }
        Ok(Some(logical))
    }

    fn heredocs(&mut self, logical: &Logical) -> Result<Vec<Heredoc>, ParseError> {
        let mut found = Vec::new();
        // The exec form has no here-documents.
        if words::json(&logical.rest).is_some() {
            return Ok(found);
        }
        for word in words::split(&logical.rest, self.escape) {
            let Some(mut heredoc) = start(&word) else {
                continue;
            };
            if found.len() >= limits::HEREDOCS {
                return Err(Problem::TooLarge {
                    what: "the number of here-documents",
                    limit: limits::HEREDOCS,
                }
                .at(logical.line));
            }
            self.read(&mut heredoc, logical.line)?;
            found.push(heredoc);
        }
        Ok(found)
    }

    fn read(&mut self, heredoc: &mut Heredoc, line: u32) -> Result<(), ParseError> {
        for (_, text) in self.lines.by_ref() {
            let text = match heredoc.strip_tabs {
                true => text.trim_start_matches('\t'),
                false => text,
            };
            if text == heredoc.name {
                return Ok(());
            }
            heredoc.content.push_str(text);
            heredoc.content.push('\n');
        }
        let name = crate::shortened(&heredoc.name);
        Err(Problem::invalid(format!("the here-document {name} has no end")).at(line))
    }
}

/// A word that begins a here-document: `<<NAME`, `<<-NAME`, `<<"NAME"`, with a descriptor in front or without.
pub fn start(word: &str) -> Option<Heredoc> {
    let word = word.trim_start_matches(|c: char| c.is_ascii_digit());
    let rest = word.strip_prefix("<<")?;
    let (strip_tabs, rest) = match rest.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, rest),
    };
    let quoted = ['"', '\'']
        .iter()
        .find_map(|quote| rest.strip_prefix(*quote)?.strip_suffix(*quote));
    let name = quoted.unwrap_or(rest);
    let fits = |c: char| !c.is_whitespace() && !"<>\"'|&;()$`\\".contains(c);
    if name.is_empty() || !name.chars().all(fits) {
        return None;
    }
    Some(Heredoc {
        name: name.to_owned(),
        expand: quoted.is_none(),
        strip_tabs,
        content: String::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<(u32, String, String)> {
        let (all, _) = split(text).unwrap();
        all.into_iter().map(|l| (l.line, l.name, l.rest)).collect()
    }

    #[test]
    fn lines_are_joined_and_numbered() {
        let text = "# syntax=x\n\nfrom a\nRUN one \\\n  # a comment\n\n  two\nCMD x";
        assert_eq!(
            lines(text),
            [
                (3, "FROM".into(), "a".into()),
                (4, "RUN".into(), "one   two".into()),
                (8, "CMD".into(), "x".into()),
            ]
        );
    }

    #[test]
    fn the_escape_character_can_be_chosen() {
        let (all, escape) = split("# escape=`\nRUN a `\n b\\\nCMD c").unwrap();
        assert_eq!(escape, '`');
        assert_eq!(all[0].rest, "a  b\\");
        assert_eq!(all.len(), 2);
        let (_, late) = split("# hello\n# escape=`\nRUN a").unwrap();
        assert_eq!(late, '\\');
        assert_eq!(split("# escape=x\n").unwrap_err().line, 1);
    }

    #[test]
    fn here_documents_follow_their_line() {
        let (all, _) = split("RUN <<A cat <<-'B'\none\nA\n\ttwo\n\tB\nCMD x").unwrap();
        let docs = &all[0].heredocs;
        assert_eq!(docs[0].content, "one\n");
        assert!(docs[0].expand && !docs[1].expand);
        assert_eq!(docs[1].content, "two\n");
        assert_eq!(all[1].name, "CMD");
        assert_eq!(split("FROM a\nRUN <<A\nb\n").unwrap_err().line, 2);
    }

    #[test]
    fn text_that_looks_like_a_here_document_is_none() {
        for text in [
            "RUN cat <<<x",
            "RUN echo '<<A'",
            "RUN a<<B",
            "RUN [\"<<A\"]",
        ] {
            assert!(split(text).unwrap().0[0].heredocs.is_empty(), "{text}");
        }
    }
}
