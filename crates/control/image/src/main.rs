//! `forkd-image`: makes guest kernels, initramfs files and root images.

mod args;
mod commands;
mod fetch;

use std::error::Error as _;
use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let args = args::Args::parse();
    // Before the first thread: the confinement belongs to threads.
    if let args::Command::Fetch(args) = &args.command {
        return fetch::main(args);
    }
    match commands::run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            let mut cause = error.source();
            while let Some(error) = cause {
                eprintln!("  because {error}");
                cause = error.source();
            }
            if let Some(hint) = error.hint() {
                eprintln!("\nhint: {hint}");
            }
            ExitCode::FAILURE
        }
    }
}
