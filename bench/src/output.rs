//! What is measured, printed as people or programs want it.

use serde::Serialize;

/// What a benchmark found.
pub trait Findings: Serialize {
    /// A table for people.
    fn text(&self) -> String;
}

/// How to print it.
#[derive(Debug, clap::Args)]
pub struct OutputArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl OutputArgs {
    /// Prints it.
    pub fn print(&self, found: &impl Findings) -> anyhow::Result<()> {
        if self.json {
            println!("{}", serde_json::to_string_pretty(found)?);
        } else {
            print!("{}", found.text());
        }
        Ok(())
    }
}
