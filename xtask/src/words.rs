//! Words that do not belong in the tree: promises for later, and the names of package registries.

use crate::finding::Finding;
use crate::source::{SourceFile, Tree};

/// Spelt in pieces, so that this file passes its own test.
const LATER: [&str; 3] = [
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("X", "XX"),
];

/// Code that stands in for code, and tests that do not run.
const STUBS: [&str; 3] = [
    concat!("to", "do!("),
    concat!("unimple", "mented!("),
    concat!("#[", "ignore"),
];

/// Hosts of registries: a build takes what the machine is configured with, and nothing else.
const REGISTRIES: [&str; 11] = [
    concat!("deb.", "debian.org"),
    concat!("security.", "debian.org"),
    concat!("ftp.", "debian.org"),
    concat!("archive.", "ubuntu.com"),
    concat!("security.", "ubuntu.com"),
    concat!("static.", "rust-lang.org"),
    concat!("sh.", "rustup.rs"),
    concat!("index.", "crates.io"),
    concat!("registry.", "npmjs.org"),
    concat!("//py", "pi.org"),
    concat!("files.", "pythonhosted.org"),
];

pub fn check(tree: &Tree) -> anyhow::Result<Vec<Finding>> {
    Ok(tree
        .files
        .iter()
        .filter(|file| is_ours(&file.path))
        .flat_map(check_file)
        .collect())
}

/// Written by people: not a lock file, not a generated document, not the licence.
fn is_ours(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    !path.starts_with("openapi/")
        && !path.contains("/generated/")
        && !path.contains("/corpus/")
        && !matches!(
            name,
            "Cargo.lock" | "package-lock.json" | "uv.lock" | "LICENSE"
        )
}

fn check_file(file: &SourceFile) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, line) in file.text.lines().enumerate() {
        let mut complain =
            |message: String| findings.push(Finding::at(&file.path, index + 1, message));
        for word in LATER.iter().filter(|word| has_word(line, word)) {
            complain(format!("{word} is a promise nobody keeps"));
        }
        if file.extension() == "rs" {
            for stub in STUBS.iter().filter(|stub| line.contains(**stub)) {
                complain(format!("`{stub}` stands in for something that is missing"));
            }
        }
        for host in REGISTRIES.iter().filter(|host| line.contains(**host)) {
            complain(format!(
                "names the registry {host}; use what the machine is configured with"
            ));
        }
    }
    findings
}

/// The word on its own, not as a part of another or of a pattern for temporary names.
fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let ends = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric() && c != '_');
        ends(line[..at].chars().next_back()) && ends(line[at + word.len()..].chars().next())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(path: &str, text: &str) -> usize {
        check(&Tree::of(&[(path, text)])).unwrap().len()
    }

    #[test]
    fn each_word_is_found() {
        for word in LATER {
            assert_eq!(count("docs/a.md", &format!("{word}: later")), 1, "{word}");
        }
        for stub in STUBS {
            assert_eq!(count("a.rs", stub), 1, "{stub}");
        }
        for host in REGISTRIES {
            assert_eq!(
                count("scripts/a.sh", &format!("http://{host}/x")),
                1,
                "{host}"
            );
        }
    }

    #[test]
    fn parts_of_words_are_not() {
        let six = LATER[2].repeat(2);
        assert_eq!(count("scripts/a.sh", &format!("mktemp /tmp/a.{six}")), 0);
        assert_eq!(count("a.md", "a method"), 0);
    }

    #[test]
    fn a_lock_file_may_name_its_registry() {
        assert_eq!(count("Cargo.lock", REGISTRIES[7]), 0);
    }
}
