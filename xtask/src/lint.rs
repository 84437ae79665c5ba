//! Runs all gates and reports the result of each.
//!
//! A gate that cannot run counts as failed; the other gates still run. A unit test runs the gates that need
//! no build on this tree.

use std::process::Command;
use std::time::Instant;

use anyhow::Context;

use crate::finding::Finding;
use crate::source::Tree;
use crate::{budget, deps, docs, lint_tables, placement, words};

/// A check of the tree.
pub type Gate = fn(&Tree) -> anyhow::Result<Vec<Finding>>;

const GATES: [(&str, Gate); 5] = [
    ("dependency table", deps::check),
    ("budget", budget::check),
    ("unsafe", check_unsafe),
    ("words", words::check),
    (DOCS, docs::check),
];

/// The name of the one gate that needs a built program.
const DOCS: &str = "commands in documents";

/// Commands that print their own findings.
const TOOLS: [(&str, &[&str]); 2] = [
    ("format", &["fmt", "--all", "--check"]),
    (
        "clippy",
        &[
            "clippy",
            "-q",
            "--release",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ],
    ),
];

/// Runs all tools and gates. Returns true if all passed.
pub fn run_all(tree: &Tree) -> anyhow::Result<bool> {
    let mut failed = Vec::new();
    for (name, arguments) in TOOLS {
        let begin = Instant::now();
        let status = Command::new("cargo")
            .args(arguments)
            .current_dir(&tree.root)
            .status()
            .with_context(|| format!("cannot run cargo {}", arguments[0]))?;
        report(name, status.success(), begin);
        if !status.success() {
            failed.push(name);
        }
    }
    for (name, gate) in GATES {
        let begin = Instant::now();
        // A gate that cannot run has failed. The other gates still run.
        let findings =
            gate(tree).unwrap_or_else(|error| vec![Finding::in_file(name, format!("{error:#}"))]);
        for finding in &findings {
            println!("  {finding}");
        }
        report(name, findings.is_empty(), begin);
        if !findings.is_empty() {
            failed.push(name);
        }
    }
    if failed.is_empty() {
        println!("all gates passed");
    } else {
        println!("failed: {}", failed.join(", "));
    }
    Ok(failed.is_empty())
}

/// Checks both rules about `unsafe`: its places in the sources, and the lint tables in the manifests.
pub fn check_unsafe(tree: &Tree) -> anyhow::Result<Vec<Finding>> {
    let mut findings = placement::check(tree)?;
    findings.extend(lint_tables::check(tree)?);
    Ok(findings)
}

fn report(name: &str, passed: bool, begin: Instant) {
    let verdict = if passed { "ok    " } else { "FAILED" };
    println!("{verdict}  {name} ({:.1} s)", begin.elapsed().as_secs_f32());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_tree_passes_the_gates_that_need_no_build() {
        let tree = Tree::of_this_workspace().unwrap();
        for (name, gate) in GATES.iter().filter(|(name, _)| *name != DOCS) {
            let findings: Vec<String> = gate(&tree)
                .unwrap()
                .iter()
                .map(Finding::to_string)
                .collect();
            assert!(findings.is_empty(), "{name}: {findings:#?}");
        }
    }
}
