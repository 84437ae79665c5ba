//! Who and where a process runs when a request does not say: the image may have put that into a file.

use std::fs;
use std::sync::OnceLock;

/// Lines `user=…` and `cwd=…`; both may be missing, and so may the file.
const FILE: &str = "/etc/forkd/defaults";

/// The defaults of the image.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Defaults {
    /// A name, a number, or a pair of them with a colon.
    pub user: Option<String>,
    pub cwd: Option<String>,
}

impl Defaults {
    /// The defaults of the image. The file is read once, and children inherit the answer.
    pub fn of_image() -> &'static Self {
        static READ: OnceLock<Defaults> = OnceLock::new();
        READ.get_or_init(|| Self::parse(&fs::read_to_string(FILE).unwrap_or_default()))
    }

    fn parse(text: &str) -> Self {
        let value = |key: &str| {
            let mut lines = text.lines();
            let found = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
            found.filter(|value| !value.is_empty()).map(str::to_owned)
        };
        Self {
            user: value("user"),
            cwd: value("cwd").filter(|cwd| cwd.starts_with('/')),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_or_odd_says_nothing() {
        let read = Defaults::parse("cwd=/srv\nother=1\nuser=app:app\nuser=b\n");
        assert_eq!(read.user.as_deref(), Some("app:app"));
        assert_eq!(read.cwd.as_deref(), Some("/srv"));
        for text in ["", "user\ncwd=\n", "cwd=relative", "\0"] {
            assert_eq!(Defaults::parse(text), Defaults::default(), "{text:?}");
        }
    }
}
