//! Two children of one snapshot have one memory. Their generators must part.
//!
//! `tests/clone` stands in for the snapshot: it forks a process behind the back of everything that would notice a
//! fork, as a restored snapshot does. Without a reseed both processes draw the same values, which each test shows
//! first.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::TestAgent;
use forkd_guest_proto::{ErrorCode, InterpStart};
use serde_json::Value;

type Drawn = BTreeMap<String, Value>;

/// An agent that has started an interpreter of this language; `None` where the language is not installed.
async fn agent_with(language: &str) -> Option<TestAgent> {
    let agent = TestAgent::start().await;
    let start = InterpStart {
        language: language.into(),
        ..Default::default()
    };
    match agent.connect().await.interp_start(start).await {
        Ok(_) => Some(agent),
        // Not every machine that runs the tests has it.
        Err(error) if error.code() == Some(ErrorCode::ExecFailed) => None,
        Err(error) => panic!("{error}"),
    }
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/clone")
        .join(name)
}

fn checked(output: Output) -> Vec<u8> {
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{complaint}");
    output.stdout
}

struct Clones {
    library: PathBuf,
    run: PathBuf,
}

impl Clones {
    fn build(agent: &TestAgent) -> Self {
        let library = agent.dir.path().join("clone.node");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-o"]).arg(&library);
        checked(cc.arg(source("clone.c")).output().unwrap());
        Self {
            library,
            run: agent.dir.path().join("run"),
        }
    }

    /// The values that two clones of one process draw.
    fn draw(&self, program: &[&str], script: &str, reseed: bool) -> [Drawn; 2] {
        // A clone of a process with threads can hang on a lock that one of them held.
        let mut command = Command::new("timeout");
        command.arg("60").args(program).arg(source(script));
        command.args([&self.library, &self.run]);
        command.args(reseed.then_some("reseed"));
        let stdout = checked(command.env("LD_PRELOAD", &self.library).output().unwrap());
        let lines = serde_json::Deserializer::from_slice(&stdout).into_iter::<Drawn>();
        let drawn: Vec<Drawn> = lines.collect::<Result<_, _>>().unwrap();
        drawn.try_into().unwrap()
    }

    fn must_part(&self, program: &[&str], script: &str) {
        let [one, other] = self.draw(program, script, false);
        assert_eq!(one, other, "the stand-in must not let the clones part");
        let [one, other] = self.draw(program, script, true);
        for (name, value) in &one {
            assert_ne!(Some(value), other.get(name), "{name}");
        }
        assert!(!one.is_empty() && one.len() == other.len());
    }
}

#[tokio::test]
async fn clones_of_a_node_process_part() {
    let Some(agent) = agent_with("node").await else {
        return;
    };
    // Helper threads of V8 do not exist in a clone.
    Clones::build(&agent).must_part(&["node", "--single-threaded"], "draw.js");
}

#[tokio::test]
async fn clones_of_a_python_process_part() {
    let Some(agent) = agent_with("python").await else {
        return;
    };
    Clones::build(&agent).must_part(&["python3"], "draw.py");
}
