//! User processes that are frozen for a cut, in a real control group.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{TestAgent, sh};
use forkd_agent_client::Calls;
use forkd_guest_proto::{ErrorCode, EvalRequest, FreezeRequest, IdentityRequest};

/// How often the end of a group is tried, every ten milliseconds.
const TRIES: u32 = 1000;

/// A control group of this test alone. Its processes end with it.
struct Group(PathBuf);

impl Group {
    /// `None` on a machine where this test may not make one.
    fn make() -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let root = mounts.lines().find_map(|line| {
            let mut words = line.split_ascii_whitespace().skip(1);
            let (mount, kind) = (words.next()?, words.next()?);
            (kind == "cgroup2").then_some(mount)
        })?;
        let name = format!("forkd-agent-test-{:016x}", rand::random::<u64>());
        let path = Path::new(root).join(name);
        fs::create_dir(&path).ok()?;
        Some(Self(path))
    }

    fn says(&self, line: &str) -> bool {
        let events = fs::read_to_string(self.0.join("cgroup.events")).unwrap();
        events.lines().any(|found| found == line)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The kernel takes the last process out of the group after its parent has reaped it. A process that the agent was
        // just starting may come into the group late, so the rest is killed again; a test never hangs here.
        for _ in 0..TRIES {
            let _ = fs::write(self.0.join("cgroup.kill"), "1");
            match fs::remove_dir(&self.0) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    std::thread::sleep(std::time::Duration::from_millis(10));
                }
                _ => return,
            }
        }
    }
}

async fn start() -> Option<(TestAgent, Calls, Group)> {
    let group = Group::make()?;
    let agent = TestAgent::start_with(&["--cgroup".as_ref(), group.0.as_os_str()]).await;
    let client = agent.connect().await;
    Some((agent, client, group))
}

fn identity() -> IdentityRequest {
    IdentityRequest {
        generation: "g".into(),
        entropy: "5a".repeat(48),
        ..Default::default()
    }
}

fn python(code: &str) -> EvalRequest {
    EvalRequest {
        code: code.into(),
        ..Default::default()
    }
}

#[tokio::test]
async fn a_frozen_guest_starts_nothing_and_its_source_is_thawed() {
    let Some((_agent, client, group)) = start().await else {
        return;
    };
    let busy = client.start(sh("while :; do :; done")).await.unwrap();
    let report = client.freeze(FreezeRequest::default()).await.unwrap();
    assert!(!report.was_frozen && group.says("frozen 1"));
    assert!(client.ping().await.unwrap().frozen);
    for refused in [
        client.start(sh("true")).await.err(),
        client.eval(python("1")).await.err(),
    ] {
        assert_eq!(refused.unwrap().code(), Some(ErrorCode::Busy));
    }
    assert!(client.thaw().await.unwrap().was_frozen);
    assert!(group.says("frozen 0") && !client.ping().await.unwrap().frozen);
    client.exec_capture(sh("true")).await.unwrap();
    client.forget(busy.process).await.unwrap();
}

#[tokio::test]
async fn a_new_identity_thaws_when_it_is_in_force() {
    let Some((_agent, client, group)) = start().await else {
        return;
    };
    client
        .eval(python("import random\nrandom.seed(1)"))
        .await
        .unwrap();
    client.freeze(FreezeRequest::default()).await.unwrap();
    let report = client.identity(identity()).await.unwrap();
    assert!(report.thawed && group.says("frozen 0"));
    assert_eq!(report.interpreters, ["python"]);
    let drawn = client.eval(python("random.random()")).await.unwrap();
    assert_ne!(drawn.result.repr.as_deref(), Some("0.13436424411240122"));
    // A guest that was not frozen is told apart.
    assert!(!client.identity(identity()).await.unwrap().thawed);
}

#[tokio::test]
async fn an_agent_without_a_group_refuses_to_freeze() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let refused = client.freeze(FreezeRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::Unsupported));
    assert!(!client.thaw().await.unwrap().was_frozen);
}
