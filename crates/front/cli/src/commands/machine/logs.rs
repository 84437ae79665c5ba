//! `forkd machine logs`: prints the console output of the machine.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::time::Duration;

use anyhow::anyhow;

use super::machine;
use crate::args::machine::LogsArgs;
use crate::error::{CliError, CliResult, Exit};
use crate::ui::Ui;

/// Interval at which a growing file is polled.
const PACE: Duration = Duration::from_millis(200);

/// Runs `forkd machine logs`.
pub async fn run(args: &LogsArgs, ui: &Ui) -> CliResult {
    let machine = machine(&args.machine)?;
    let path = machine.layout().console();
    if args.path {
        ui.line(path.display())?;
        return Ok(Exit::OK);
    }
    let mut file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(CliError::from(anyhow!(
                "machine {} has no console output yet",
                machine.name()
            ))
            .with_hint("start it with `forkd machine start`"));
        }
        Err(error) => return Err(error.into()),
    };
    let mut pace = tokio::time::interval(PACE);
    loop {
        pass_on(&mut file, ui)?;
        if !args.follow {
            return Ok(Exit::OK);
        }
        pace.tick().await;
        // The next start of the machine truncates the file.
        if file.stream_position()? > file.metadata()?.len() {
            file.seek(SeekFrom::Start(0))?;
        }
    }
}

fn pass_on(file: &mut File, ui: &Ui) -> io::Result<()> {
    let mut chunk = vec![0; 64 * 1024];
    loop {
        let length = file.read(&mut chunk)?;
        if length == 0 {
            return Ok(());
        }
        ui.raw(&chunk[..length])?;
    }
}
