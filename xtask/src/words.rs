//! Words that do not belong in the tree.
//!
//! Two rules with different strictness:
//! - Forbidden words (promises for later, stubs, host names of package registries) are a finding wherever they stand.
//! - Unclear wording ([`patterns`]) is counted per crate. The counts may only fall ([`ratchet`]).

mod patterns;
mod ratchet;

use crate::finding::Finding;
use crate::source::{SourceFile, Tree};

pub use ratchet::{list, report_falls, update};

/// Spelt in pieces, so that this file passes its own test.
const LATER: [&str; 3] = [
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("X", "XX"),
];

/// Code that stands in for missing code, and tests that do not run.
const STUBS: [&str; 3] = [
    concat!("to", "do!("),
    concat!("unimple", "mented!("),
    concat!("#[", "ignore"),
];

/// A build uses the registries that the host is configured with, so no registry is named.
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
    let mut findings = forbidden(tree);
    findings.extend(ratchet::check(tree)?);
    Ok(findings)
}

fn forbidden(tree: &Tree) -> Vec<Finding> {
    tree.files
        .iter()
        .filter(|file| is_handwritten(&file.path))
        .flat_map(forbidden_in)
        .collect()
}

/// False for lock files, generated documents, fuzz inputs and the licence.
fn is_handwritten(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    !path.starts_with("openapi/")
        && !path.contains("/generated/")
        && !path.contains("/corpus/")
        && !matches!(
            name,
            "Cargo.lock" | "package-lock.json" | "uv.lock" | "LICENSE"
        )
}

fn forbidden_in(file: &SourceFile) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, line) in file.text.lines().enumerate() {
        let mut complain =
            |message: String| findings.push(Finding::at(&file.path, index + 1, message));
        for word in LATER.iter().filter(|word| has_word(line, word)) {
            complain(format!("{word}: do the work now, or leave the note out"));
        }
        if file.extension() == "rs" {
            for stub in STUBS.iter().filter(|stub| line.contains(**stub)) {
                complain(format!("`{stub}` is a stub or a test that does not run"));
            }
        }
        for host in REGISTRIES.iter().filter(|host| line.contains(**host)) {
            complain(format!(
                "names the registry {host}; use the registries that the host is configured with"
            ));
        }
    }
    findings
}

fn has_word(line: &str, word: &str) -> bool {
    positions(line, word).next().is_some()
}

/// Where the word stands on its own: neither as a part of a longer word nor of a `mktemp` pattern.
fn positions<'a>(line: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let ends = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric() && c != '_');
    line.match_indices(word)
        .map(|(at, _)| at)
        .filter(move |at| {
            ends(line[..*at].chars().next_back()) && ends(line[at + word.len()..].chars().next())
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(path: &str, text: &str) -> usize {
        forbidden(&Tree::of(&[(path, text)])).len()
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
