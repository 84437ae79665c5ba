//! Warm interpreters of a real agent process.

mod common;

use common::{TestAgent, sh};
use forkd_agent_client::Output;
use forkd_guest_proto::{
    ErrorCode, EvalMode, EvalRequest, InterpStart, InterpState, JsonText, Warmup,
};
use serde_json::json;

fn code(code: &str) -> EvalRequest {
    EvalRequest {
        code: code.to_owned(),
        ..Default::default()
    }
}

fn python(warmup: Warmup) -> InterpStart {
    InterpStart {
        language: "python".into(),
        warmup,
        ..Default::default()
    }
}

fn value(json: Option<JsonText>) -> Option<serde_json::Value> {
    json.map(|json| json.parse().unwrap())
}

#[tokio::test]
async fn state_is_kept_and_values_come_back() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let done = client
        .eval(code("x = 20\nprint('hello')\nx + 1"))
        .await
        .unwrap();
    assert_eq!(
        (done.result.repr.as_deref(), value(done.result.json)),
        (Some("21"), Some(json!(21)))
    );
    assert_eq!(done.stdout, b"hello\n");
    let done = client
        .eval(code("import sys; print('bad', file=sys.stderr); x = x * 2"))
        .await
        .unwrap();
    assert_eq!(
        (done.result.repr, done.stderr.as_slice()),
        (None, &b"bad\n"[..])
    );
    let done = client
        .eval(EvalRequest {
            mode: EvalMode::Eval,
            ..code("{'x': x, 'y': None}")
        })
        .await
        .unwrap();
    assert_eq!(value(done.result.json), Some(json!({ "x": 40, "y": null })));
    let done = client
        .eval(EvalRequest {
            mode: EvalMode::Exec,
            ..code("x")
        })
        .await
        .unwrap();
    assert_eq!((done.result.repr, done.result.count), (None, 4));
    let done = client
        .eval(code("import os; os.system('echo from a child')"))
        .await
        .unwrap();
    assert_eq!(
        (done.stdout.as_slice(), done.result.repr.as_deref()),
        (&b"from a child\n"[..], Some("0"))
    );
    let done = client
        .eval(code("import asyncio\nawait asyncio.sleep(0, 'awaited')"))
        .await
        .unwrap();
    assert_eq!(done.result.repr.as_deref(), Some("'awaited'"));
    let done = client.eval(code("object()")).await.unwrap();
    assert!(done.result.repr.unwrap().starts_with("<object") && done.result.json.is_none());
}

#[tokio::test]
async fn what_is_raised_comes_with_its_traceback() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let done = client
        .eval(code("def f():\n    return 1 / 0\nf()"))
        .await
        .unwrap();
    let error = done.result.error.unwrap();
    assert_eq!(
        (error.name.as_str(), error.message.as_str()),
        ("ZeroDivisionError", "division by zero")
    );
    assert!(
        error.traceback.contains("return 1 / 0") && !error.traceback.contains("python.py"),
        "{}",
        error.traceback
    );
    let error = client
        .eval(code("1 +"))
        .await
        .unwrap()
        .result
        .error
        .unwrap();
    assert_eq!(error.name, "SyntaxError");
    let error = client
        .eval(code("exit(3)"))
        .await
        .unwrap()
        .result
        .error
        .unwrap();
    assert_eq!(error.name, "SystemExit");
    assert_eq!(
        client.eval(code("1")).await.unwrap().result.repr.as_deref(),
        Some("1")
    );
}

#[tokio::test]
async fn output_comes_as_it_is_printed() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let mut eval = client
        .eval_stream(code("print('first')\nimport time\ntime.sleep(1000)"))
        .await
        .unwrap();
    assert_eq!(
        eval.next_output().await.unwrap(),
        Some(Output::Stdout(b"first\n".to_vec()))
    );
    client.interp_interrupt("python").await.unwrap();
    let result = eval.wait().await.unwrap();
    assert_eq!(result.error.unwrap().name, "KeyboardInterrupt");
    // More than a pipe and a window hold, to the byte.
    let done = client
        .eval(code("for i in range(60000): print('line', i)\ni"))
        .await
        .unwrap();
    let expected: String = (0..60000).map(|i| format!("line {i}\n")).collect();
    assert!(done.stdout == expected.as_bytes());
    let limited = EvalRequest {
        output_limit: Some(10),
        ..code("print('x' * 100)")
    };
    let done = client.eval(limited).await.unwrap();
    assert_eq!(
        (done.stdout.as_slice(), done.truncated),
        (&b"xxxxxxxxxx"[..], true)
    );
}

#[tokio::test]
async fn values_and_code_larger_than_a_frame_go_through() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let long = format!("len({:?})", "y".repeat(600_000));
    assert_eq!(
        value(client.eval(code(&long)).await.unwrap().result.json),
        Some(json!(600_000))
    );
    let done = client.eval(code("'z' * 1000000")).await.unwrap();
    assert_eq!(value(done.result.json), Some(json!("z".repeat(1_000_000))));
}

#[tokio::test]
async fn a_call_can_time_out_be_cancelled_and_be_stubborn() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    client.eval(code("kept = 7")).await.unwrap();
    let slow = EvalRequest {
        timeout_ms: Some(100),
        ..code("while True: pass")
    };
    let done = client.eval(slow).await.unwrap();
    assert!(done.result.timed_out);
    assert_eq!(done.result.error.unwrap().name, "KeyboardInterrupt");
    let cancelled = client
        .eval_stream(code("import time; time.sleep(1000)"))
        .await
        .unwrap();
    drop(cancelled);
    assert_eq!(
        client
            .eval(code("kept"))
            .await
            .unwrap()
            .result
            .repr
            .as_deref(),
        Some("7")
    );
    let stubborn = "import signal; signal.signal(2, signal.SIG_IGN)\nwhile True: pass";
    let stubborn = EvalRequest {
        timeout_ms: Some(100),
        ..code(stubborn)
    };
    assert_eq!(
        client.eval(stubborn).await.unwrap_err().code(),
        Some(ErrorCode::Timeout)
    );
    let error = client
        .eval(code("kept"))
        .await
        .unwrap()
        .result
        .error
        .unwrap();
    assert_eq!(error.name, "NameError");
}

#[tokio::test]
async fn a_dead_interpreter_is_reported_and_replaced_warm() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let warmup = Warmup {
        imports: vec!["math".into(), "json as j".into()],
        code: "ready = math.pi".into(),
    };
    let info = client.interp_start(python(warmup)).await.unwrap();
    assert_eq!(
        (info.state, info.restarts, info.warmup_error),
        (InterpState::Ready, 0, None)
    );
    let died = client
        .eval(code(
            "import os; print('last words', flush=True); os._exit(9)",
        ))
        .await
        .unwrap_err();
    assert_eq!(died.code(), Some(ErrorCode::InterpDied));
    assert_eq!(
        client
            .eval(code("j.dumps(round(ready, 2))"))
            .await
            .unwrap()
            .result
            .repr
            .as_deref(),
        Some("'3.14'")
    );
    let [info] = client.interp_list().await.unwrap().try_into().unwrap();
    assert_eq!(
        (info.restarts, info.last_death.as_deref()),
        (1, Some("it returned 9"))
    );
    // One that dies between calls is replaced without being asked.
    client
        .exec_capture(sh(&format!("kill -9 {}", info.pid)))
        .await
        .unwrap();
    loop {
        let [now] = client.interp_list().await.unwrap().try_into().unwrap();
        if now.restarts == 2 && now.state == InterpState::Ready {
            assert_ne!(now.pid, info.pid);
            break;
        }
    }
    client.interp_restart("python").await.unwrap();
    client.interp_stop("python").await.unwrap();
    assert_eq!(client.interp_list().await.unwrap(), []);
}

#[tokio::test]
async fn a_bad_warm_up_or_program_is_told() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let warmup = Warmup {
        imports: vec!["no_such_module_at_all".into()],
        code: String::new(),
    };
    let info = client.interp_start(python(warmup)).await.unwrap();
    assert_eq!(info.warmup_error.unwrap().name, "ModuleNotFoundError");
    let missing = InterpStart {
        name: Some("m".into()),
        program: Some("/no/python".into()),
        ..python(Warmup::default())
    };
    assert_eq!(
        client.interp_start(missing).await.unwrap_err().code(),
        Some(ErrorCode::ExecFailed)
    );
    let wrong = InterpStart {
        name: Some("w".into()),
        program: Some("/bin/false".into()),
        ..python(Warmup::default())
    };
    assert_eq!(
        client.interp_start(wrong).await.unwrap_err().code(),
        Some(ErrorCode::InterpDied)
    );
    let unknown = client
        .eval(EvalRequest {
            interp: Some("fortran".into()),
            ..code("1")
        })
        .await
        .unwrap_err();
    assert_eq!(unknown.code(), Some(ErrorCode::NotFound));
}

#[tokio::test]
async fn named_interpreters_are_apart() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    for name in ["a", "b"] {
        client
            .interp_start(InterpStart {
                name: Some(name.into()),
                ..python(Warmup::default())
            })
            .await
            .unwrap();
        let request = EvalRequest {
            interp: Some(name.into()),
            ..code(&format!("who = {name:?}"))
        };
        client.eval(request).await.unwrap();
    }
    for name in ["a", "b"] {
        let request = EvalRequest {
            interp: Some(name.into()),
            ..code("who")
        };
        assert_eq!(
            value(client.eval(request).await.unwrap().result.json),
            Some(json!(name))
        );
    }
}

#[tokio::test]
async fn node_follows_the_same_protocol() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let start = InterpStart {
        language: "node".into(),
        warmup: Warmup {
            imports: vec!["node:path".into()],
            code: "globalThis.n = 40".into(),
        },
        ..Default::default()
    };
    match client.interp_start(start).await {
        Ok(info) => assert!(info.version.starts_with('v')),
        // Not every machine that runs the tests has it.
        Err(error) if error.code() == Some(ErrorCode::ExecFailed) => return,
        Err(error) => panic!("{error}"),
    }
    let node = |text: &str| EvalRequest {
        interp: Some("node".into()),
        ..code(text)
    };
    let done = client
        .eval(node(
            "const m = n + 2; console.log(path.basename('/a/b')); ({ m })",
        ))
        .await
        .unwrap();
    assert_eq!(
        (value(done.result.json), done.stdout.as_slice()),
        (Some(json!({ "m": 42 })), &b"b\n"[..])
    );
    assert_eq!(
        value(
            client
                .eval(node("Promise.resolve(m + 1)"))
                .await
                .unwrap()
                .result
                .json
        ),
        Some(json!(43))
    );
    let error = client
        .eval(node("null.x"))
        .await
        .unwrap()
        .result
        .error
        .unwrap();
    assert_eq!(error.name, "TypeError");
    let slow = EvalRequest {
        timeout_ms: Some(200),
        ..node("while (true) {}")
    };
    let done = client.eval(slow).await.unwrap();
    assert!(done.result.timed_out && done.result.error.is_some());
    assert_eq!(
        value(client.eval(node("m")).await.unwrap().result.json),
        Some(json!(42))
    );
}
