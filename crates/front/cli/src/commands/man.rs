//! `forkd man`: prints manual pages generated from the argument types.

use anyhow::Context;
use clap::CommandFactory;
use clap_mangen::Man;

use crate::args::{Cli, ManArgs};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd man`.
pub fn run(args: &ManArgs, ui: &Ui) -> CliResult {
    match &args.out {
        Some(dir) => {
            std::fs::create_dir_all(dir)
                .and_then(|()| clap_mangen::generate_to(Cli::command(), dir))
                .with_context(|| format!("cannot write manual pages to {}", dir.display()))?;
            ui.aside(format_args!("manual pages written to {}", dir.display()));
        }
        None => {
            let mut page = Vec::new();
            Man::new(Cli::command()).render(&mut page)?;
            ui.raw(&page)?;
        }
    }
    Ok(Exit::OK)
}
