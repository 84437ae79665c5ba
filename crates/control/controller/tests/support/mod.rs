//! The daemon as a process of its own.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};

use forkd_vmm_proto::spawn::{SpawnCommand, SpawnError, SpawnReply};
use rustix::process::{Pid, Signal, kill_process};

use crate::stand_in::{Answer, stand_in};

/// A daemon with everything below one directory, and a `forkd-spawn` that has no VM and makes none.
pub struct Daemon {
    child: Child,
    stderr: BufReader<ChildStderr>,
}

impl Daemon {
    /// Answers once it listens.
    pub fn start(root: &Path, args: &[&str]) -> Self {
        let run = root.join("run");
        std::fs::create_dir(&run).unwrap();
        stand_in(&run.join("spawn.sock"), makes_none);
        let mut child = Command::new(env!("CARGO_BIN_EXE_forkd-controller"))
            .arg("serve")
            .args(args)
            .arg("--data-dir")
            .arg(root.join("data"))
            .arg("--run-dir")
            .arg(run)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains("listening") {
            let read = stderr.read_line(&mut said).unwrap();
            assert!(read > 0, "the daemon ended: {said}");
        }
        Self { child, stderr }
    }

    /// How it ended, and what it said since it listened.
    pub fn stop(mut self) -> (ExitStatus, String) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let mut said = String::new();
        self.stderr.read_to_string(&mut said).unwrap();
        (self.child.wait().unwrap(), said)
    }
}

/// A test that failed before the stop leaves no daemon.
impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn makes_none(command: SpawnCommand) -> Answer {
    match command {
        SpawnCommand::Adopt { .. } => Ok(SpawnReply::Adopted {
            vms: Vec::new(),
            more: false,
        }),
        SpawnCommand::Kept { .. } => Ok(SpawnReply::Kept {
            names: Vec::new(),
            more: false,
        }),
        _ => Err(SpawnError::ShellFailed {
            reason: "a stand-in makes none".into(),
        }),
    }
}
