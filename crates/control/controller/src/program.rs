//! The program: arguments, logging, subcommands.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::args::{Cli, Command};
use anyhow::Context;
use clap::Parser;
use forkd_edge::audit;
use forkd_edge::telemetry::{self, Export};
use forkd_sandboxes::private::restrict_umask;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// Runs the program.
pub fn main() -> ExitCode {
    restrict_umask();
    let cli = Cli::parse();
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            for cause in error.chain().skip(1) {
                eprintln!("  caused by: {cause}");
            }
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    match cli.command {
        Command::Serve(args) => {
            let settings = args.settings()?;
            let traces = args
                .collector()?
                .map(|collector| Export::start(&collector))
                .transpose()?;
            log_to_stderr(args.log_json, traces.as_ref());
            let outcome = tokio::runtime::Runtime::new()?.block_on(crate::serve::run(settings));
            if let Some(traces) = traces {
                traces.stop();
            }
            outcome
        }
        Command::Openapi => {
            print!("{}", forkd_planes::rest::openapi_text());
            Ok(())
        }
        Command::VerifyAudit { files, anchor } => verify_audit(&files, &anchor),
    }
}

fn verify_audit(files: &[PathBuf], anchors: &[String]) -> anyhow::Result<()> {
    let mut text = String::new();
    for file in files {
        let more = std::fs::read_to_string(file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        text.push_str(&more);
    }
    match audit::verify(&text) {
        Ok(count) => {
            println!("{count} lines, none missing or changed between the first and the last")
        }
        Err(number) => anyhow::bail!("line {number} does not follow the one before it"),
    }
    for anchor in anchors {
        if !audit::has_anchor(&text, anchor) {
            anyhow::bail!("no line has the digest {anchor}: the log was cut off or written anew");
        }
    }
    Ok(())
}

fn log_to_stderr(json: bool, traces: Option<&Export>) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let log = if json {
        log.json().boxed()
    } else {
        log.boxed()
    };
    tracing_subscriber::registry()
        .with(log.with_filter(telemetry::without_traces(filter)))
        .with(traces.map(Export::layer))
        .init();
}
