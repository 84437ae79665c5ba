//! Prints results as text or as JSON.
//!
//! A benchmark implements [`Findings`]; [`OutputArgs::print`] chooses the format.

use serde::Serialize;

/// Results of a benchmark.
pub trait Findings: Serialize {
    /// A table with its conditions.
    fn text(&self) -> String;
}

#[derive(Debug, clap::Args)]
pub struct OutputArgs {
    /// Print the results as JSON.
    #[arg(long)]
    json: bool,
}

impl OutputArgs {
    /// Prints the results to stdout.
    pub fn print(&self, found: &impl Findings) -> anyhow::Result<()> {
        if self.json {
            println!("{}", serde_json::to_string_pretty(found)?);
        } else {
            print!("{}", found.text());
        }
        Ok(())
    }
}
