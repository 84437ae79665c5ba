//! `forkd rmi`: deletes snapshots.

use crate::args::RmiArgs;
use crate::daemon::{block_on, connect};
use crate::error::CliResult;
use crate::outcome::{self, Outcome};
use crate::ui::Ui;

/// Runs `forkd rmi`.
pub fn run(args: &RmiArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let mut outcomes = Vec::with_capacity(args.tags.len());
        for tag in &args.tags {
            let result = client.delete_snapshot(tag, args.cascade, args.force).await;
            outcomes.push(Outcome::new(tag.clone(), result));
        }
        outcome::show(&outcomes, args.json, ui)
    })
}
