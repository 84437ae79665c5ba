//! Options in front of the arguments of an instruction: `--name` and `--name=value`.

use crate::{Problem, shortened};

/// The options of an instruction, and the text behind them.
#[derive(Debug, Default)]
pub struct Flags {
    found: Vec<(String, Option<String>)>,
}

impl Flags {
    /// Takes the options off the front of the text.
    pub fn take(text: &str, escape: char) -> (Self, &str) {
        let mut flags = Self::default();
        let mut rest = text.trim_start();
        while let Some(flag) = rest.strip_prefix("--") {
            let (word, after) = first_word(flag, escape);
            // `--` alone ends the options.
            if word.is_empty() {
                return (flags, after.trim_start());
            }
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (word, None),
            };
            flags.found.push((name, value));
            rest = after.trim_start();
        }
        (flags, rest)
    }

    /// The value of an option that may be given once.
    pub fn one(&mut self, name: &str) -> Result<Option<String>, Problem> {
        let mut all = self.many(name)?;
        match all.len() {
            0 | 1 => Ok(all.pop()),
            _ => Err(Problem::invalid(format!("--{name} is given twice"))),
        }
    }

    /// Every value of an option.
    pub fn many(&mut self, name: &str) -> Result<Vec<String>, Problem> {
        let (ours, others) = std::mem::take(&mut self.found)
            .into_iter()
            .partition(|(found, _)| found == name);
        self.found = others;
        let ours: Vec<(String, Option<String>)> = ours;
        ours.into_iter()
            .map(|(_, value)| {
                value.ok_or_else(|| Problem::invalid(format!("--{name} needs a value")))
            })
            .collect()
    }

    /// A switch: `--name`, `--name=true` or `--name=false`.
    pub fn switch(&mut self, name: &str) -> Result<bool, Problem> {
        for (found, value) in &mut self.found {
            if found == name && value.is_none() {
                *value = Some("true".to_owned());
            }
        }
        match self.one(name)?.as_deref() {
            None | Some("false" | "0") => Ok(false),
            Some("true" | "1") => Ok(true),
            Some(_) => Err(Problem::invalid(format!("--{name} is true or false"))),
        }
    }

    /// Refuses options that were not asked for.
    pub fn end(self, instruction: &str) -> Result<(), Problem> {
        match self.found.first() {
            None => Ok(()),
            Some((name, _)) => Err(Problem::unsupported(format!(
                "{instruction} does not take --{}",
                shortened(name)
            ))),
        }
    }
}

/// The first word without its quotes, and the text behind it.
fn first_word(text: &str, escape: char) -> (String, &str) {
    let mut word = String::new();
    let mut quote = None;
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match quote {
            None if c.is_whitespace() => return (word, text.get(at..).unwrap_or_default()),
            None if c == '"' || c == '\'' => quote = Some(c),
            Some(open) if c == open => quote = None,
            _ if c == escape && quote != Some('\'') => word.extend(chars.next().map(|(_, c)| c)),
            _ => word.push(c),
        }
    }
    (word, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_end_at_the_first_argument() {
        let (mut flags, rest) = Flags::take("--a=1  --b --c=\"x y\" arg --d", '\\');
        assert_eq!(flags.one("a").unwrap().as_deref(), Some("1"));
        assert!(flags.switch("b").unwrap());
        assert_eq!(flags.one("c").unwrap().as_deref(), Some("x y"));
        assert_eq!(rest, "arg --d");
        flags.end("COPY").unwrap();
    }

    #[test]
    fn mistakes_are_named() {
        let error = |text: &str| {
            let (mut flags, _) = Flags::take(text, '\\');
            let one = flags.one("a").map(drop);
            one.and_then(|()| flags.switch("b").map(drop))
                .and_then(|()| flags.end("RUN"))
                .unwrap_err()
                .to_string()
        };
        assert_eq!(error("--a"), "--a needs a value");
        assert_eq!(error("--a=1 --a=2"), "--a is given twice");
        assert_eq!(error("--b=maybe"), "--b is true or false");
        assert_eq!(error("--z=1"), "RUN does not take --z");
    }
}
