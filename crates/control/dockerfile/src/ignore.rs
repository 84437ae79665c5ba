//! `.dockerignore`: the files of a folder that are not part of the context of a build.

use crate::{ParseError, Pattern, Problem, limits, shortened};

/// The patterns of a `.dockerignore` file. The last pattern that matches decides.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ignore {
    rules: Vec<Rule>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    pattern: Pattern,
    /// `!`: matching files are part of the context again.
    keep: bool,
}

impl Ignore {
    /// Parses the file.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let too_large = |what, limit| Problem::TooLarge { what, limit };
        if text.len() > limits::IGNORE_BYTES {
            return Err(too_large("the file", limits::IGNORE_BYTES).at(1));
        }
        let mut rules = Vec::new();
        for (number, line) in (1..).zip(text.trim_start_matches('\u{feff}').lines()) {
            if line.starts_with('#') {
                continue;
            }
            let (keep, pattern) = match line.trim().strip_prefix('!') {
                Some(rest) => (true, rest.trim()),
                None => (false, line.trim()),
            };
            let cleaned = clean(pattern);
            if cleaned.is_empty() {
                if keep {
                    return Err(Problem::invalid("a pattern is missing behind !").at(number));
                }
                continue;
            }
            if rules.len() >= limits::IGNORE_PATTERNS {
                return Err(too_large("the number of patterns", limits::IGNORE_PATTERNS).at(number));
            }
            let pattern = Pattern::of_paths(&cleaned).ok_or_else(|| {
                Problem::invalid(format!("{} is not a pattern", shortened(pattern))).at(number)
            })?;
            rules.push(Rule { pattern, keep });
        }
        Ok(Self { rules })
    }

    /// Whether a path, relative to the folder and with slashes, is left out. A rule for a folder holds for its files.
    pub fn ignores(&self, path: &str) -> bool {
        let mut ignored = false;
        for rule in &self.rules {
            // A rule that changes nothing need not be asked.
            if rule.keep == ignored && parts(path).any(|part| rule.pattern.matches(part)) {
                ignored = !rule.keep;
            }
        }
        ignored
    }

    /// Whether nothing below an ignored folder can be part of the context.
    pub fn never_keeps(&self) -> bool {
        !self.rules.iter().any(|rule| rule.keep)
    }
}

/// A path, and every folder on the way to it.
fn parts(path: &str) -> impl Iterator<Item = &str> {
    let ends = path.char_indices().filter(|(_, c)| *c == '/');
    ends.map(|(at, _)| path.get(..at).unwrap_or_default())
        .chain([path])
}

/// Without `.`, doubled slashes and slashes at both ends; `..` takes a part back.
fn clean(pattern: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in pattern.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ignores(text: &str, path: &str) -> bool {
        Ignore::parse(text).unwrap().ignores(path)
    }

    #[test]
    fn the_last_match_decides() {
        let text =
            "# comment\n\n*.md\n!README.md\nnode_modules\n/build/\n**/*.log\ntmp/*\n!tmp/keep\n";
        for path in ["a.md", "node_modules/x/y", "build/x", "a/b.log", "tmp/x"] {
            assert!(ignores(text, path), "{path}");
        }
        for path in ["README.md", "d/a.md", "x/node_modules", "tmp", "tmp/keep"] {
            assert!(!ignores(text, path), "{path}");
        }
        assert!(!ignores("*\n!src\n", "src/deep/a"));
        assert!(ignores("!src\n*\n", "src"));
    }

    #[test]
    fn mistakes_have_a_line() {
        assert_eq!(Ignore::parse("a\n!\n").unwrap_err().line, 2);
        assert_eq!(Ignore::parse("a\n\n[x\n").unwrap_err().line, 3);
    }

    proptest! {
        #[test]
        fn any_file_is_parsed_or_refused(text in any::<String>(), path in any::<String>()) {
            if let Ok(ignore) = Ignore::parse(&text) {
                let _ = ignore.ignores(&path);
            }
        }

        #[test]
        fn a_kept_name_is_kept(names in prop::collection::vec("[a-z]{1,5}", 1..5), at in any::<prop::sample::Index>()) {
            let kept = at.get(&names);
            let text = format!("{}\n!{kept}\n", names.join("\n"));
            prop_assert!(!ignores(&text, kept));
        }
    }
}
