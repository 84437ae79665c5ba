//! Patterns of file names: `*`, `?`, `[a-z]`, `**` and escapes.
//!
//! A pattern is a list of steps, and matching follows all of them at once. The time is at most the product of both
//! lengths: no pattern of a stranger makes it exponential.

use crate::limits;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Char(char),
    /// Any one character: `?`.
    One,
    /// `*`: any characters, but no slash in a pattern of paths.
    Many,
    /// `**` at the end: any characters.
    Everything,
    /// `**/`: nothing, or any folders with their slash. Goes on to `Folders`, or behind it.
    MaybeFolders,
    Folders,
    Class {
        not: bool,
        ranges: Vec<(char, char)>,
    },
}

/// A pattern of paths or of texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern {
    steps: Vec<Step>,
    /// `*` and `?` do not match a slash.
    paths: bool,
}

impl Pattern {
    /// A pattern of paths. None if it is too long or ends inside brackets or behind an escape.
    pub fn of_paths(text: &str) -> Option<Self> {
        if text.len() > limits::PATTERN_BYTES {
            return None;
        }
        Some(Self {
            steps: parse(text, true)?,
            paths: true,
        })
    }

    /// A pattern of any text, as in `${NAME#pattern}`. A malformed pattern matches itself.
    pub(crate) fn of_text(text: &str) -> Self {
        let parsed = match text.len() <= limits::PATTERN_BYTES {
            true => parse(text, false),
            false => None,
        };
        Self {
            steps: parsed.unwrap_or_else(|| text.chars().map(Step::Char).collect()),
            paths: false,
        }
    }

    /// Whether a text has characters with a meaning in patterns.
    pub fn is_pattern(text: &str) -> bool {
        text.contains(['*', '?', '[', '\\'])
    }

    /// Whether the whole text matches.
    pub fn matches(&self, text: &str) -> bool {
        let mut states = self.start();
        for c in text.chars() {
            states = self.after(&states, c);
            if !states.contains(&true) {
                return false;
            }
        }
        states.last() == Some(&true)
    }

    /// Where the longest match at the start of the text ends.
    pub(crate) fn longest_prefix(&self, text: &str) -> Option<usize> {
        let mut states = self.start();
        let mut found = (states.last() == Some(&true)).then_some(0);
        for (at, c) in text.char_indices() {
            states = self.after(&states, c);
            if states.last() == Some(&true) {
                found = Some(at + c.len_utf8());
            }
            if !states.contains(&true) {
                break;
            }
        }
        found
    }

    fn start(&self) -> Vec<bool> {
        let mut states = vec![false; self.steps.len() + 1];
        self.enter(&mut states, 0);
        states
    }

    /// Marks a state, and those that are reached from there without a character.
    fn enter(&self, states: &mut [bool], at: usize) {
        let mut at = at;
        loop {
            match states.get_mut(at) {
                Some(state) if !*state => *state = true,
                _ => return,
            }
            at = match self.steps.get(at) {
                Some(Step::Many | Step::Everything) => at + 1,
                Some(Step::MaybeFolders) => {
                    if let Some(inside) = states.get_mut(at + 1) {
                        *inside = true;
                    }
                    at + 2
                }
                _ => return,
            };
        }
    }

    fn after(&self, states: &[bool], c: char) -> Vec<bool> {
        let mut next = vec![false; states.len()];
        let special = |c: char| !(self.paths && c == '/');
        for (at, step) in self.steps.iter().enumerate() {
            if states.get(at) != Some(&true) {
                continue;
            }
            match step {
                Step::Char(wanted) if *wanted == c => self.enter(&mut next, at + 1),
                Step::One if special(c) => self.enter(&mut next, at + 1),
                Step::Many if special(c) => self.enter(&mut next, at),
                Step::Everything => self.enter(&mut next, at),
                Step::Folders => {
                    if let Some(state) = next.get_mut(at) {
                        *state = true;
                    }
                    if c == '/' {
                        self.enter(&mut next, at + 1);
                    }
                }
                Step::Class { not, ranges } if special(c) => {
                    let inside = ranges.iter().any(|(low, high)| (*low..=*high).contains(&c));
                    if inside != *not {
                        self.enter(&mut next, at + 1);
                    }
                }
                _ => {}
            }
        }
        next
    }
}

fn parse(text: &str, paths: bool) -> Option<Vec<Step>> {
    let mut steps = Vec::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '*' if paths && chars.peek() == Some(&'*') => {
                chars.next();
                chars.next_if_eq(&'/');
                match chars.peek() {
                    Some(_) => steps.extend([Step::MaybeFolders, Step::Folders]),
                    None => steps.push(Step::Everything),
                }
            }
            '*' => steps.push(Step::Many),
            '?' => steps.push(Step::One),
            '[' => {
                let not = chars.next_if(|c| *c == '^' || *c == '!').is_some();
                let mut ranges = Vec::new();
                loop {
                    let low = match chars.next()? {
                        ']' if !ranges.is_empty() => break,
                        '\\' => chars.next()?,
                        c => c,
                    };
                    let high = match chars.next_if_eq(&'-') {
                        Some(_) => match chars.next()? {
                            '\\' => chars.next()?,
                            c => c,
                        },
                        None => low,
                    };
                    ranges.push((low, high));
                }
                steps.push(Step::Class { not, ranges });
            }
            '\\' => steps.push(Step::Char(chars.next()?)),
            c => steps.push(Step::Char(c)),
        }
    }
    Some(steps)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn patterns_of_paths() {
        for (pattern, yes, no) in [
            ("a*c", "abbc", "ab/c"),
            ("*.go", "x.go", "d/x.go"),
            ("**/*.go", "x.go", "x.goo"),
            ("**/*.go", "a/b/x.go", "a/b/go"),
            ("**/x", "a/x", "ax"),
            ("**foo", "a/foo", "afoo"),
            ("a/**", "a/b/c", "a"),
            ("a/**/z", "a/z", "a/yz"),
            ("a/**/z", "a/b/c/z", "az"),
            ("?[a-c]", "xb", "/b"),
            ("[^a]b", "cb", "ab"),
            ("\\*", "*", "x"),
            ("", "", "x"),
        ] {
            let pattern_ = Pattern::of_paths(pattern).unwrap();
            assert!(pattern_.matches(yes), "{pattern} {yes}");
            assert!(!pattern_.matches(no), "{pattern} {no}");
        }
        for bad in ["[a", "[]", "a\\", "[a-"] {
            assert_eq!(Pattern::of_paths(bad), None, "{bad}");
        }
    }

    /// The same by trying everything, for patterns without `**`.
    fn slow(pattern: &[char], text: &[char]) -> bool {
        match (pattern.first(), text.first()) {
            (None, None) => true,
            (Some('*'), _) => {
                slow(&pattern[1..], text)
                    || (!text.is_empty() && text[0] != '/' && slow(pattern, &text[1..]))
            }
            (Some('?'), Some(c)) => *c != '/' && slow(&pattern[1..], &text[1..]),
            (Some(p), Some(c)) => p == c && slow(&pattern[1..], &text[1..]),
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn matching_is_that_of_the_slow_way(pattern in "([ab/?]|[*][ab/]){0,8}", text in "[ab/]{0,10}") {
            let chars = |text: &str| text.chars().collect::<Vec<_>>();
            let expected = slow(&chars(&pattern), &chars(&text));
            prop_assert_eq!(Pattern::of_paths(&pattern).unwrap().matches(&text), expected);
        }

        #[test]
        fn any_pattern_is_parsed_or_refused(pattern in any::<String>(), text in any::<String>()) {
            if let Some(pattern) = Pattern::of_paths(&pattern) {
                let _ = pattern.matches(&text);
            }
        }
    }
}
