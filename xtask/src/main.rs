//! The gates of this repository. `cargo xtask lint` runs them all; each is also a command of its own.

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
    /// Run every gate that needs no guest, and report all failures
    Lint,
    /// Which crate may use which
    Deps,
    /// Length of files and functions
    Budget,
    /// Every `make` and `forkd` command in the README and the guides exists
    Docs,
    /// `unsafe` stays in its places, and every crate carries the lint tables
    Unsafe,
    /// Words that do not belong in the tree
    Words,
    /// Print what the probe says of this host's KVM, as one word
    Probe,
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
        Command::Words => words::check,
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
