//! A real agent process, listening on a Unix socket.
#![allow(dead_code)]

pub mod orphans;

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use forkd_agent_client::{Calls, Client, Options};
use forkd_guest_proto::ExecRequest;

/// How long one request of a test may take on a busy machine.
pub const LIMIT: std::time::Duration = std::time::Duration::from_secs(300);

/// Agents of this process that live.
static LIVE: AtomicUsize = AtomicUsize::new(0);

/// An agent that runs as an ordinary process; killed when dropped. The last one takes every process along that it and
/// the others have started.
pub struct TestAgent {
    child: Child,
    pub dir: tempfile::TempDir,
}

impl TestAgent {
    /// Starts one and waits until its socket is there.
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// The same with more arguments.
    pub async fn start_with(arguments: &[&std::ffi::OsStr]) -> Self {
        orphans::adopt();
        LIVE.fetch_add(1, Ordering::Relaxed);
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let child = Command::new(env!("CARGO_BIN_EXE_forkd-agent"))
            .arg("--listen")
            .arg(format!("unix:{}", socket.display()))
            .args(arguments)
            .env("FORKD_AGENT_RUN_DIR", dir.path().join("run"))
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let agent = Self { child, dir };
        // The socket is there when connecting works; nothing else says so.
        for _ in 0..2000 {
            if std::os::unix::net::UnixStream::connect(&socket).is_ok() {
                return agent;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        panic!("the agent did not open its socket");
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("agent.sock")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub async fn connect(&self) -> Calls {
        Client::connect_unix(&self.socket(), Options::default())
            .await
            .unwrap()
            .each_within(LIMIT)
    }

    /// A path for a file of a test.
    pub fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    /// Resident memory of the agent, KiB.
    pub fn rss_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status
            .lines()
            .find(|line| line.starts_with("VmRSS:"))
            .unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for TestAgent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if LIVE.fetch_sub(1, Ordering::Relaxed) == 1 {
            orphans::end_all();
        }
    }
}

/// A shell line as a request.
pub fn sh(line: &str) -> ExecRequest {
    ExecRequest {
        shell: Some(line.to_owned()),
        ..Default::default()
    }
}
