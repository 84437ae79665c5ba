//! The guest as a machine, as far as an ordinary process may go.

mod common;

use std::os::unix::fs::PermissionsExt;

use common::{TestAgent, sh};
use forkd_guest_proto::{
    ClockRequest, ErrorCode, EvalRequest, IdentityRequest, InterpStart, NetworkRequest,
    QuiesceRequest, ShutdownRequest, Warmup,
};

fn identity(generation: &str, byte: &str) -> IdentityRequest {
    IdentityRequest {
        generation: generation.into(),
        entropy: byte.repeat(48),
        ..Default::default()
    }
}

#[tokio::test]
async fn a_new_identity_reseeds_interpreters_and_runs_hooks() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let hooks = agent.dir.path().join("run/on-fork.d");
    std::fs::create_dir_all(&hooks).unwrap();
    for (name, text, mode) in [
        (
            "10-ok",
            "#!/bin/sh\necho generation $FORKD_GENERATION\n",
            0o755,
        ),
        ("20-fails", "#!/bin/sh\nexit 7\n", 0o755),
        ("30-slow", "#!/bin/sh\nsleep 1000\n", 0o755),
        ("40-ignored", "#!/bin/sh\necho never\n", 0o644),
    ] {
        std::fs::write(hooks.join(name), text).unwrap();
        std::fs::set_permissions(hooks.join(name), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let warmup = Warmup {
        imports: vec!["random".into(), "uuid".into(), "ssl".into()],
        code: String::new(),
    };
    client
        .interp_start(InterpStart {
            language: "python".into(),
            warmup,
            ..Default::default()
        })
        .await
        .unwrap();
    let draw = async || {
        let code = "random.getrandbits(64)".to_owned();
        client
            .eval(EvalRequest {
                code,
                ..Default::default()
            })
            .await
            .unwrap()
            .result
            .json
            .unwrap()
    };
    // The same state before, as in two forks of one parent.
    let mut drawn = Vec::new();
    for byte in ["aa", "bb", "aa"] {
        client
            .eval(EvalRequest {
                code: "random.seed(1)".into(),
                ..Default::default()
            })
            .await
            .unwrap();
        let request = IdentityRequest {
            hook_timeout_ms: Some(1500),
            ..identity(byte, byte)
        };
        let report = client.identity(request).await.unwrap();
        assert_eq!(
            (report.generation.as_str(), report.interpreters.as_slice()),
            (byte, &["python".to_owned()][..])
        );
        assert_eq!(report.warnings, Vec::<String>::new());
        let seen: Vec<_> = report
            .hooks
            .iter()
            .map(|hook| (hook.name.as_str(), hook.code))
            .collect();
        assert_eq!(
            seen,
            [("10-ok", Some(0)), ("20-fails", Some(7)), ("30-slow", None)]
        );
        assert_eq!(report.hooks[0].output, format!("generation {byte}\n"));
        drawn.push(draw().await);
    }
    assert_ne!(drawn[0], drawn[1]);
    assert_eq!(drawn[0], drawn[2]);
    let file = std::fs::read_to_string(agent.dir.path().join("run/generation")).unwrap();
    assert_eq!(
        (
            file.as_str(),
            client.ping().await.unwrap().generation.as_str()
        ),
        ("aa\n", "aa")
    );
    assert_eq!(client.processes().await.unwrap(), []);
}

#[tokio::test]
async fn interpreters_of_one_child_do_not_share_their_seed() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let mut drawn = Vec::new();
    for name in ["one", "other"] {
        client
            .interp_start(InterpStart {
                name: Some(name.into()),
                language: "python".into(),
                warmup: Warmup {
                    imports: vec!["random".into()],
                    code: String::new(),
                },
                ..Default::default()
            })
            .await
            .unwrap();
    }
    let report = client.identity(identity("g", "ee")).await.unwrap();
    assert_eq!(report.interpreters, ["one", "other"]);
    for name in ["one", "other"] {
        let request = EvalRequest {
            interp: Some(name.into()),
            code: "random.getrandbits(64)".into(),
            ..Default::default()
        };
        drawn.push(client.eval(request).await.unwrap().result.json.unwrap());
    }
    assert_ne!(drawn[0], drawn[1]);
}

/// Makes a reseed raise an error.
const SABOTAGE: &str = "import sys, types\nsys.modules['random'] = types.SimpleNamespace()";
/// Starts a thread, so that code can run between two calls.
const THREAD: &str = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()";

fn code(code: &str) -> EvalRequest {
    EvalRequest {
        code: code.into(),
        ..Default::default()
    }
}

#[tokio::test]
async fn an_interpreter_with_a_thread_that_cannot_reseed_fails_the_identity() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    for part in [THREAD, SABOTAGE] {
        client.eval(code(part)).await.unwrap();
    }
    let error = client.identity(identity("g", "ab")).await.unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::Internal));
    assert!(error.to_string().contains("python"), "{error}");
}

#[tokio::test]
async fn an_idle_interpreter_that_cannot_reseed_runs_nothing_more() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    client.eval(code(SABOTAGE)).await.unwrap();
    let before = client.interp_list().await.unwrap();
    let report = client.identity(identity("g", "ab")).await.unwrap();
    assert_eq!(report.interpreters, ["python"]);
    let error = client.eval(code("1")).await.err().unwrap();
    assert_eq!(error.code(), Some(ErrorCode::Internal));
    assert!(error.to_string().contains("reseeded"), "{error}");
    // The next process has random numbers of its own.
    let done = client.eval(code("'sys' in globals()")).await.unwrap();
    assert_eq!(done.result.repr.as_deref(), Some("False"));
    assert_ne!(client.interp_list().await.unwrap()[0].pid, before[0].pid);
}

/// Has the interpreter create a file when its generator is seeded.
fn seeding_creates(path: &std::path::Path) -> String {
    let path = path.display();
    format!(
        "import sys, types\nsys.modules['random'] = types.SimpleNamespace(seed=lambda _: open({path:?}, 'x').close())",
        path = path.to_string()
    )
}

#[tokio::test]
async fn an_idle_interpreter_is_reseeded_before_its_next_call_and_not_earlier() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let seeded = agent.dir.path().join("seeded");
    client.eval(code(&seeding_creates(&seeded))).await.unwrap();
    let report = client.identity(identity("g", "ab")).await.unwrap();
    assert_eq!(report.interpreters, ["python"]);
    assert!(!seeded.exists());
    let asked = format!(
        "import os\nassert os.path.exists({:?})",
        seeded.display().to_string()
    );
    let done = client.eval(code(&asked)).await.unwrap();
    assert_eq!(done.result.error, None);
    // Once for each identity: a second seed would find the file.
    assert_eq!(client.eval(code("1")).await.unwrap().result.error, None);
}

#[tokio::test]
async fn an_interpreter_with_a_thread_or_a_timer_is_reseeded_at_once() {
    let timer = "import signal\nsignal.signal(signal.SIGALRM, lambda *_: 0)\nsignal.alarm(1000)";
    for part in [THREAD, timer] {
        let agent = TestAgent::start().await;
        let client = agent.connect().await;
        let seeded = agent.dir.path().join("seeded");
        for part in [part, &seeding_creates(&seeded)] {
            let done = client.eval(code(part)).await.unwrap();
            assert_eq!(done.result.error, None);
        }
        client.identity(identity("g", "ab")).await.unwrap();
        assert!(seeded.exists(), "{part}");
    }
}

#[tokio::test]
async fn a_busy_interpreter_is_reseeded_too() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let code = "import random\nrandom.seed(1)\nprint('ready')\nwhile random.getstate() == (random.seed(1), random.getstate())[1]: pass";
    let mut busy = client
        .eval_stream(EvalRequest {
            code: code.into(),
            ..Default::default()
        })
        .await
        .unwrap();
    busy.next_output().await.unwrap();
    let report = client.identity(identity("g", "cc")).await.unwrap();
    assert_eq!(report.interpreters, ["python"]);
}

#[tokio::test]
async fn an_ordinary_process_leaves_its_machine_alone() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let before = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let request = IdentityRequest {
        hostname: Some("stolen".into()),
        unix_ns: Some(0),
        ..identity("g", "dd")
    };
    client.identity(request).await.unwrap();
    assert_eq!(
        std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap(),
        before
    );
    let set = ClockRequest {
        set_unix_ns: Some(0),
        shift_ns: None,
    };
    // A shift of one nanosecond: a missing guard must not disturb the machine that runs the test.
    let shift = ClockRequest {
        set_unix_ns: None,
        shift_ns: Some(1),
    };
    for request in [set, shift] {
        let refused = client.clock(request).await.unwrap_err();
        assert_eq!(refused.code(), Some(ErrorCode::Permission), "{request:?}");
    }
    let network = client.network(NetworkRequest::default()).await.unwrap_err();
    assert_eq!(network.code(), Some(ErrorCode::Permission));
    let short = IdentityRequest {
        entropy: "00".into(),
        ..Default::default()
    };
    assert_eq!(
        client.identity(short).await.unwrap_err().code(),
        Some(ErrorCode::BadRequest)
    );
}

#[tokio::test]
async fn clocks_metrics_and_quiesce_answer() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let first = client.clock(ClockRequest::default()).await.unwrap();
    let second = client.clock(ClockRequest::default()).await.unwrap();
    assert!(second.monotonic_ns > first.monotonic_ns);
    let metrics = client.metrics().await.unwrap();
    assert!(metrics.memory.total_kib > 0 && metrics.cpu.count > 0 && metrics.agent_rss_kib > 0);
    client
        .eval(EvalRequest {
            code: "1".into(),
            ..Default::default()
        })
        .await
        .unwrap();
    let report = client
        .quiesce(QuiesceRequest {
            sync: false,
            ..Default::default()
        })
        .await
        .unwrap();
    assert_eq!(report.warnings, Vec::<String>::new());
}

#[tokio::test]
async fn a_shutdown_is_answered_before_the_end() {
    let mut agent = TestAgent::start().await;
    let client = agent.connect().await;
    client.exec_capture(sh("true")).await.unwrap();
    client.shutdown(ShutdownRequest::default()).await.unwrap();
    client.closed().await;
    while agent.is_alive() {
        tokio::task::yield_now().await;
    }
}
