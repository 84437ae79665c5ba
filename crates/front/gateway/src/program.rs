//! The program: arguments, logging, exit code.

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::args::Args;

/// Runs the gateway until it is told to stop.
pub fn main() -> ExitCode {
    let args = Args::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    let run = || -> anyhow::Result<()> {
        let settings = args.settings()?;
        tokio::runtime::Runtime::new()?.block_on(crate::serve::run(settings))
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            for cause in error.chain().skip(1) {
                eprintln!("  because {cause}");
            }
            ExitCode::FAILURE
        }
    }
}
