//! Checks that every `make` and `forkd` command in the documents exists, and that the reference of the command line
//! lists every command.
//!
//! A command starts with `make` or `forkd` and stands in a fenced block or a code span. Targets are looked up
//! in the Makefile; subcommands and flags in the `--help` output of the program.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use crate::finding::Finding;
use crate::source::Tree;

/// Lists every command.
const REFERENCE: &str = "docs/guides/cli.md";

pub fn check(tree: &Tree) -> anyhow::Result<Vec<Finding>> {
    let makefile = tree.files.iter().find(|file| file.path == "Makefile");
    let targets = makefile
        .map(|file| make_targets(&file.text))
        .unwrap_or_default();
    let documents: Vec<_> = tree
        .with_extension("md")
        .filter(|f| is_document(&f.path))
        .collect();
    let mut help = None;
    let mut findings = Vec::new();
    for file in documents {
        for command in commands(&file.text) {
            let problem = match command.words[0].as_str() {
                "make" => check_make(&command.words, &targets),
                _ => {
                    if help.is_none() {
                        help = Some(Help::new(&tree.root)?);
                    }
                    let help = help.as_mut().context("no help")?;
                    check_forkd(&command.words, &mut |path| help.of(path))?
                }
            };
            findings.extend(problem.map(|text| Finding::at(&file.path, command.line, text)));
        }
    }
    if let Some(reference) = tree.files.iter().find(|file| file.path == REFERENCE) {
        let mut help = help.map_or_else(|| Help::new(&tree.root), Ok)?;
        for name in undescribed(&help.of(&[])?, &reference.text) {
            let text = format!("the command {name} is not described");
            findings.push(Finding::at(REFERENCE, 1, text));
        }
    }
    Ok(findings)
}

/// The commands of a help text that a document does not show.
fn undescribed(help: &str, document: &str) -> Vec<String> {
    let mut names: Vec<_> = subcommands(help).into_iter().collect();
    names.retain(|name| !document.contains(&format!("`forkd {name}")));
    names
}

fn is_document(path: &str) -> bool {
    matches!(path, "README.md" | "CONTRIBUTING.md" | "SPECIFICATION.md")
        || path.starts_with("docs/guides/")
}

#[derive(Debug, PartialEq, Eq)]
struct Spelt {
    line: usize,
    words: Vec<String>,
}

fn commands(markdown: &str) -> Vec<Spelt> {
    let mut found = Vec::new();
    let mut fenced = false;
    for (index, line) in markdown.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if fenced {
            found.extend(command_in(line, index + 1));
        } else {
            let spans = line.split('`').skip(1).step_by(2);
            found.extend(spans.filter_map(|span| command_in(span, index + 1)));
        }
    }
    found
}

/// Parses a `make` or `forkd` command. The rest behind `--`, a pipe or a comment belongs to another program.
fn command_in(text: &str, line: usize) -> Option<Spelt> {
    let text = text
        .trim()
        .trim_start_matches("$ ")
        .trim_start_matches("sudo ");
    let words: Vec<String> = text
        .split_whitespace()
        .take_while(|word| !matches!(*word, "--" | "|" | "&&" | ";" | "#" | ">" | "\\"))
        .map(str::to_owned)
        .collect();
    let program = words.first()?;
    matches!(program.as_str(), "make" | "forkd").then_some(Spelt { line, words })
}

fn make_targets(makefile: &str) -> BTreeSet<String> {
    makefile
        .lines()
        .filter_map(|line| line.split_once(':'))
        .filter(|(name, rest)| !rest.starts_with('=') && !name.starts_with(['.', '\t', '#', ' ']))
        .flat_map(|(names, _)| names.split_whitespace().map(str::to_owned))
        .collect()
}

fn check_make(words: &[String], targets: &BTreeSet<String>) -> Option<String> {
    let mut goals = words[1..]
        .iter()
        .filter(|word| !word.contains('=') && !word.starts_with('-'));
    goals
        .find(|goal| !targets.contains(*goal))
        .map(|goal| format!("no make target {goal}"))
}

/// Follows the subcommands as far as the help lists them, then looks up each flag.
fn check_forkd(
    words: &[String],
    help: &mut dyn FnMut(&[String]) -> anyhow::Result<String>,
) -> anyhow::Result<Option<String>> {
    let mut path: Vec<String> = Vec::new();
    let mut text = help(&path)?;
    for word in words[1..].iter().take_while(|word| !word.starts_with('-')) {
        let known = subcommands(&text);
        if known.is_empty() {
            break;
        }
        // `CMD` and `<ID>` are placeholders; a lower-case word is a command.
        let placeholder = word.starts_with(|c: char| !c.is_ascii_lowercase());
        if placeholder {
            break;
        }
        if !known.contains(word) {
            return Ok(Some(format!(
                "forkd {} has no command {word}",
                path.join(" ")
            )));
        }
        path.push(word.clone());
        text = help(&path)?;
    }
    let flags = words.iter().filter(|word| word.starts_with("--"));
    for flag in flags.map(|flag| {
        flag.split('=')
            .next()
            .unwrap_or(flag)
            .trim_end_matches([']', ',', ')'])
    }) {
        if !mentions_flag(&text, flag) {
            return Ok(Some(format!("forkd {} has no flag {flag}", path.join(" "))));
        }
    }
    Ok(None)
}

fn mentions_flag(help: &str, flag: &str) -> bool {
    help.split(|c: char| c.is_whitespace() || matches!(c, ',' | '=' | '[' | ']' | '<'))
        .any(|word| word == flag)
}

/// The names in the `Commands:` section of clap's help.
fn subcommands(help: &str) -> BTreeSet<String> {
    help.lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| line.starts_with("  ") || line.is_empty())
        // Wrapped descriptions are indented deeper than names.
        .filter(|line| line.len() > 2 && !line[2..].starts_with(' '))
        .filter_map(|line| line.split_whitespace().next().map(str::to_owned))
        .collect()
}

/// Help texts of the program, one call per command.
struct Help {
    program: PathBuf,
    known: BTreeMap<Vec<String>, String>,
}

impl Help {
    fn new(root: &Path) -> anyhow::Result<Self> {
        let status = Command::new("cargo")
            // The selection of scripts/build.sh, so that both share their compiled dependencies.
            .args(["build", "-q", "--release", "--workspace", "--bin", "forkd"])
            .current_dir(root)
            .status()
            .context("cannot run cargo")?;
        if !status.success() {
            bail!("the forkd program does not build, so its commands cannot be looked up");
        }
        let target =
            std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
        Ok(Self {
            program: target.join("release/forkd"),
            known: BTreeMap::new(),
        })
    }

    fn of(&mut self, path: &[String]) -> anyhow::Result<String> {
        if let Some(text) = self.known.get(path) {
            return Ok(text.clone());
        }
        let output = Command::new(&self.program)
            .args(path)
            .arg("--help")
            .env("COLUMNS", "200")
            .output()
            .with_context(|| format!("cannot run {}", self.program.display()))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        self.known.insert(path.to_vec(), text.clone());
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn fake_help(path: &[String]) -> anyhow::Result<String> {
        Ok(match path.join(" ").as_str() {
            "" => "Usage: forkd\n\nCommands:\n  machine  A machine\n             more of it\n  exec     Run\n\nOptions:\n  -h\n",
            "machine" => "Commands:\n  start  Start\n\nOptions:\n      --json\n",
            "machine start" => "Options:\n      --cpus <N>\n      --disk[=<SIZE>]\n",
            _ => "Options:\n  -h, --help\n",
        }
        .to_owned())
    }

    fn judge(text: &str) -> Option<String> {
        check_forkd(&words(text), &mut |path| fake_help(path)).unwrap()
    }

    #[test]
    fn commands_are_found_in_blocks_and_spans() {
        let text = "run `make test` or\n```sh\n$ forkd machine start --cpus 2  # two\nls\n```\nmake no sense";
        let found: Vec<_> = commands(text)
            .into_iter()
            .map(|c| (c.line, c.words.join(" ")))
            .collect();
        assert_eq!(
            found,
            [
                (1, "make test".to_owned()),
                (3, "forkd machine start --cpus 2".to_owned())
            ]
        );
    }

    #[test]
    fn unknown_targets_are_findings() {
        let targets = make_targets("A := 1\nhelp: ## x\n\t@echo a:b\nbuild: setup\n");
        assert_eq!(
            targets,
            BTreeSet::from(["help".to_owned(), "build".to_owned()])
        );
        assert_eq!(check_make(&words("make build X=1"), &targets), None);
        assert_eq!(check_make(&words("make"), &targets), None);
        assert_eq!(
            check_make(&words("make tests"), &targets),
            Some("no make target tests".to_owned())
        );
    }

    #[test]
    fn unknown_commands_and_flags_are_findings() {
        assert_eq!(judge("forkd machine start --cpus 2 --disk=8G"), None);
        assert_eq!(judge("forkd exec ID cat"), None);
        assert_eq!(judge("forkd machine"), None);
        assert_eq!(
            judge("forkd machine begin"),
            Some("forkd machine has no command begin".to_owned())
        );
        assert_eq!(
            judge("forkd fly"),
            Some("forkd  has no command fly".to_owned())
        );
        assert_eq!(
            judge("forkd machine start --cpu 2"),
            Some("forkd machine start has no flag --cpu".to_owned())
        );
    }

    #[test]
    fn a_command_without_a_description_is_found() {
        let help = fake_help(&[]).unwrap();
        let missing = undescribed(&help, "| `forkd machine start` | start a machine |");
        assert_eq!(missing, ["exec"]);
    }

    #[test]
    fn what_belongs_to_another_program_is_not_judged() {
        let found = commands("`forkd exec ID -- make fast --now`");
        assert_eq!(found[0].words, words("forkd exec ID"));
    }

    #[test]
    fn a_document_is_checked_against_the_makefile() {
        let tree = Tree::of(&[
            ("Makefile", "test:\n"),
            ("README.md", "`make test` `make tset`"),
        ]);
        let findings = check(&tree).unwrap();
        assert_eq!(
            findings,
            [Finding::at("README.md", 1, "no make target tset")]
        );
    }
}
