//! `forkd top`: shows memory, CPU time and disk traffic of live sandboxes.

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
            counted(one.read_bytes),
            counted(one.written_bytes),
            age(one.created_at_unix),
        ]
    });
    let header = [
        "ID", "SNAPSHOT", "STATE", "CPU", "OWN", "SHARED", "READ", "WRITTEN", "AGE",
    ];
    format!(
        "{} sandboxes, {} of unshared memory\n{}",
        all.len(),
        bytes(own),
        table(header, rows)
    )
}

/// A size, or a dash if the host does not count it.
fn counted(size: Option<u64>) -> String {
    size.map_or_else(|| "-".to_owned(), bytes)
}

#[cfg(test)]
mod tests {
    use forkd_api::SandboxState;

    use super::*;

    #[test]
    fn use_of_every_resource_is_shown() {
        let one = SandboxStats {
            id: "sb1".to_owned(),
            snapshot_tag: "py".to_owned(),
            state: SandboxState::Running,
            created_at_unix: 0,
            memory_mib: 64,
            own_bytes: 3 << 20,
            shared_bytes: 5 << 20,
            cpu_us: 1_500_000,
            charged_bytes: None,
            read_bytes: Some(7 << 20),
            written_bytes: None,
        };
        let before = HashMap::from([("sb1".to_owned(), 500_000)]);
        let text = show(&[one], &before, Duration::from_secs(2));
        let row: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(&row[..4], ["sb1", "py", "running", "50%"], "{text}");
        let sizes = [bytes(3 << 20), bytes(5 << 20), bytes(7 << 20)].join(" ");
        assert!(row.join(" ").contains(&format!("{sizes} -")), "{text}");
    }
}
