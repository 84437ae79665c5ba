//! `forkd top`: shows memory and CPU time of live sandboxes.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use forkd_api::SandboxStats;

use crate::args::TopArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::table::{age, bytes, table};
use crate::ui::Ui;

/// Moves the cursor to the upper left corner and clears the screen.
const CLEAR: &[u8] = b"\x1b[H\x1b[J";

/// Runs `forkd top`.
pub fn run(args: &TopArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        if args.json {
            ui.json(&client.stats().await.map_err(failed)?)?;
            return Ok(Exit::OK);
        }
        let again = !args.once && std::io::stdout().is_terminal();
        let mut before: HashMap<String, u64> = HashMap::new();
        let mut seen = Instant::now();
        loop {
            let now = client.stats().await.map_err(failed)?;
            let passed = seen.elapsed();
            seen = Instant::now();
            let text = show(&now, &before, passed);
            before = now.into_iter().map(|one| (one.id, one.cpu_us)).collect();
            if !again {
                ui.line(text)?;
                return Ok(Exit::OK);
            }
            ui.raw(CLEAR)?;
            ui.line(text)?;
            tokio::select! {
                () = tokio::time::sleep(Duration::from_secs(args.interval)) => {}
                _ = tokio::signal::ctrl_c() => return Ok(Exit::OK),
            }
        }
    })
}

fn show(all: &[SandboxStats], before: &HashMap<String, u64>, passed: Duration) -> String {
    let own: u64 = all.iter().map(|one| one.own_bytes).sum();
    let rows = all.iter().map(|one| {
        let cpu = match before.get(&one.id) {
            Some(earlier) => {
                let used = one.cpu_us.saturating_sub(*earlier) as f64;
                format!("{:.0}%", used / passed.as_micros().max(1) as f64 * 100.0)
            }
            None => "-".to_owned(),
        };
        [
            one.id.clone(),
            one.snapshot_tag.clone(),
            format!("{:?}", one.state).to_lowercase(),
            cpu,
            bytes(one.own_bytes),
            bytes(one.shared_bytes),
            age(one.created_at_unix),
        ]
    });
    let header = ["ID", "SNAPSHOT", "STATE", "CPU", "OWN", "SHARED", "AGE"];
    format!(
        "{} sandboxes, {} of unshared memory\n{}",
        all.len(),
        bytes(own),
        table(header, rows)
    )
}
