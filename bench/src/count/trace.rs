//! System calls of processes while something happens, counted by `strace`.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::process::{Counts, Process};

/// Calls that wait until data is on disk.
const SYNCS: [&str; 5] = ["fsync", "fdatasync", "syncfs", "sync", "sync_file_range"];

/// A running `strace` of one program's processes.
pub struct Trace {
    strace: Child,
    program: String,
    out: PathBuf,
}

impl Trace {
    /// Attaches to processes of one program, and to the processes that they start.
    pub async fn attach(program: &str, processes: &[Process]) -> anyhow::Result<Option<Self>> {
        let pids: Vec<String> = processes
            .iter()
            .filter(|process| process.program == program)
            .map(|process| process.pid.to_string())
            .collect();
        if pids.is_empty() {
            return Ok(None);
        }
        let out =
            std::env::temp_dir().join(format!("forkd-bench-{}-{program}", std::process::id()));
        let strace = Command::new("strace")
            .args(["-f", "-c", "-U", "calls,name", "-o"])
            .arg(&out)
            .args(pids.iter().flat_map(|pid| ["-p", pid]))
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start strace")?;
        let trace = Self {
            strace,
            program: program.to_owned(),
            out,
        };
        trace.wait_attached(&pids).await?;
        Ok(Some(trace))
    }

    async fn wait_attached(&self, pids: &[String]) -> anyhow::Result<()> {
        let traced = |pid: &String| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            !status.contains("TracerPid:\t0\n")
        };
        for _ in 0..300 {
            if pids.iter().all(traced) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        bail!("strace did not attach to {pids:?}")
    }

    /// Detaches. Returns the number of calls and of those that sync.
    pub fn finish(mut self) -> anyhow::Result<Counts> {
        if let Some(pid) = Pid::from_raw(i32::try_from(self.strace.id())?) {
            kill_process(pid, Signal::INT)?;
        }
        self.strace.wait()?;
        let table = std::fs::read_to_string(&self.out)
            .with_context(|| format!("strace wrote no {}", self.out.display()))?;
        let _ = std::fs::remove_file(&self.out);
        Ok(sums(&self.program, &table))
    }
}

/// A line of the table is a number and the name of a call.
fn sums(program: &str, table: &str) -> Counts {
    let (mut calls, mut syncs) = (0, 0);
    for line in table.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(number), Some(name)) = (words.next(), words.next()) else {
            continue;
        };
        let Ok(number) = number.parse::<u64>() else {
            continue;
        };
        if name == "total" {
            continue;
        }
        calls += number;
        if SYNCS.contains(&name) {
            syncs += number;
        }
    }
    Counts::from([
        (format!("{program}.system_calls"), calls),
        (format!("{program}.syncs"), syncs),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_summed() {
        let table = "    calls syscall\n--------- ----------------\n       12 futex\n        2 fdatasync\n        1 fsync\n--------- ----------------\n       15 total\n";
        let found = sums("vmm", table);
        assert_eq!(found["vmm.system_calls"], 15);
        assert_eq!(found["vmm.syncs"], 3);
    }
}
