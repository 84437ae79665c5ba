//! The gates of this repository: checks on the source tree that need no guest.
//!
//! `cargo xtask lint` runs all gates, and each gate is also a command of its own. A gate is a function from a
//! [`Tree`] to a list of findings; it prints nothing and changes nothing. Exit codes: 0 passed, 1 findings, 2 the gate
//! could not run.

mod budget;
mod deps;
mod docs;
mod finding;
mod lint;
mod lint_tables;
mod placement;
mod source;
mod words;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::source::Tree;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The gates of this repository")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run format, clippy and every gate, and report all failures
    Lint,
    /// Check the dependencies between crates against the table in deps.rs
    Deps,
    /// Check the length of files and functions
    Budget,
    /// Check that every `make` and `forkd` command in the documents exists
    Docs,
    /// Check where `unsafe` stands, and the lint tables of every crate
    Unsafe,
    /// Check for forbidden words, and count unclear wording per crate
    Words(WordsArgs),
    /// Print the probe's verdict on this host's KVM as one word
    Probe,
}

#[derive(clap::Args)]
struct WordsArgs {
    /// Lower the counts in xtask/words.toml to those of this tree
    #[arg(long, conflicts_with = "list")]
    update: bool,
    /// Print every place with unclear wording
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    match run(Args::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(command: Command) -> anyhow::Result<bool> {
    let tree = Tree::of_this_workspace()?;
    let gate: lint::Gate = match command {
        Command::Lint => return lint::run_all(&tree),
        Command::Deps => deps::check,
        Command::Budget => budget::check,
        Command::Docs => docs::check,
        Command::Unsafe => lint::check_unsafe,
        Command::Words(WordsArgs { update: true, .. }) => {
            words::update(&tree)?;
            return Ok(true);
        }
        Command::Words(WordsArgs { list: true, .. }) => {
            words::list(&tree)?;
            return Ok(true);
        }
        Command::Words(_) => {
            words::report_falls(&tree)?;
            words::check
        }
        Command::Probe => {
            probe();
            return Ok(true);
        }
    };
    let findings = gate(&tree)?;
    for finding in &findings {
        println!("{finding}");
    }
    Ok(findings.is_empty())
}

fn probe() {
    println!("{}", forkd_probe::probe().verdict.as_str());
}
