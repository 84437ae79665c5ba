//! `forkd where`: prints the directories that forkd uses.

use anyhow::anyhow;
use forkd_machine::dirs::Dirs;

use crate::args::WhereArgs;
use crate::error::{CliError, CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd where`.
pub fn run(args: &WhereArgs, ui: &Ui) -> CliResult {
    let dirs = Dirs::of_user().ok_or_else(|| {
        CliError::from(anyhow!(
            "no home directory: neither HOME nor the XDG variables are set"
        ))
        .with_hint("set HOME, or XDG_DATA_HOME, XDG_CACHE_HOME and XDG_STATE_HOME")
    })?;
    if args.json {
        ui.json(&dirs)?;
    } else {
        ui.line(dirs.data.display())?;
    }
    Ok(Exit::OK)
}
