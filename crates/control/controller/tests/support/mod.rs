//! The daemon as a process of its own.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};

use forkd_vmm_proto::spawn::{
    FromSpawn, SPAWN_VERSION, SpawnCommand, SpawnError, SpawnReply, SpawnRequest,
};
use forkd_vmm_proto::{MAX_MESSAGE, decode, encode};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, accept, bind, listen, recv,
    send, socket,
};
use rustix::process::{Pid, Signal, kill_process};

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
        stand_in(&run.join("spawn.sock"));
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

fn stand_in(path: &Path) {
    let listener = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&listener, 1).unwrap();
    std::thread::spawn(move || {
        let connection = accept(&listener).unwrap();
        let mut packet = vec![0; MAX_MESSAGE];
        loop {
            let (length, _) = recv(&connection, &mut packet[..], RecvFlags::empty()).unwrap();
            if length == 0 {
                return;
            }
            let request: SpawnRequest = decode(&packet[..length]).unwrap();
            let result = match request.command {
                SpawnCommand::Hello { .. } => Ok(SpawnReply::Hello {
                    version: SPAWN_VERSION,
                }),
                SpawnCommand::Adopt { .. } => Ok(SpawnReply::Adopted {
                    vms: Vec::new(),
                    more: false,
                }),
                _ => Err(SpawnError::ShellFailed {
                    reason: "a stand-in makes none".into(),
                }),
            };
            let seq = request.seq;
            let answer = encode(&FromSpawn::Response { seq, result }).unwrap();
            send(&connection, &answer, SendFlags::NOSIGNAL).unwrap();
        }
    });
}
