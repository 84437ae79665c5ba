//! Programs run by a real agent process.

mod common;

use common::{TestAgent, sh};
use forkd_agent_client::Output;
use forkd_guest_proto::{
    AttachRequest, ErrorCode, ExecRequest, ExitStatus, OnDisconnect, ProcessState, PtySize, Rlimit,
    RlimitResource,
};

#[tokio::test]
async fn outputs_status_and_environment_are_exact() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let done = client
        .exec_capture(sh("echo out; echo err >&2; exit 3"))
        .await
        .unwrap();
    assert_eq!(
        (done.stdout.as_slice(), done.stderr.as_slice()),
        (&b"out\n"[..], &b"err\n"[..])
    );
    assert_eq!(done.result.status, ExitStatus::Code(3));
    let done = client.exec_capture(sh("kill -9 $$")).await.unwrap();
    assert_eq!(done.result.status, ExitStatus::Signal(9));
    let request = ExecRequest {
        argv: vec![
            "/bin/sh".into(),
            "-c".into(),
            "echo $A-$HOME-$B; pwd; ulimit -n".into(),
        ],
        env: vec![("A".into(), Some("x y".into())), ("HOME".into(), None)],
        cwd: Some("/tmp".into()),
        rlimits: vec![Rlimit {
            resource: RlimitResource::Nofile,
            limit: Some(77),
        }],
        ..Default::default()
    };
    let done = client.exec_capture(request).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&done.stdout), "x y--\n/tmp\n77\n");
}

#[tokio::test]
async fn a_user_is_taken_on_whole() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let request = ExecRequest {
        user: Some("12345:54321".into()),
        ..sh("id -u; id -g; id -G")
    };
    let done = client.exec_capture(request).await.unwrap();
    assert_eq!(
        String::from_utf8_lossy(&done.stdout),
        "12345\n54321\n54321\n"
    );
    let request = ExecRequest {
        user: Some("no-such-user".into()),
        ..sh("true")
    };
    assert_eq!(
        client.exec_capture(request).await.unwrap_err().code(),
        Some(ErrorCode::NotFound)
    );
}

#[tokio::test]
async fn what_cannot_be_run_says_so() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let missing = ExecRequest {
        argv: vec!["/no/such/program".into()],
        ..Default::default()
    };
    assert_eq!(
        client.exec_capture(missing).await.unwrap_err().code(),
        Some(ErrorCode::ExecFailed)
    );
    let nothing = ExecRequest::default();
    assert_eq!(
        client.exec_capture(nothing).await.unwrap_err().code(),
        Some(ErrorCode::BadRequest)
    );
}

#[tokio::test]
async fn a_thousand_one_after_another_and_a_hundred_at_once() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    for number in 0..1000 {
        let request = ExecRequest {
            argv: vec!["echo".into(), number.to_string()],
            ..Default::default()
        };
        let done = client.exec_capture(request).await.unwrap();
        assert_eq!(done.stdout, format!("{number}\n").into_bytes());
        assert_eq!(done.result.status, ExitStatus::Code(0));
    }
    let running: Vec<_> = (0..100)
        .map(|number| {
            let client = client.clone();
            tokio::spawn(async move {
                let input = format!("input {number}\n").repeat(number + 1);
                let line = format!("cat; echo error {number} >&2; exit {}", number % 50);
                let done = client
                    .exec_capture_with(sh(&line), input.as_bytes(), 1 << 20)
                    .await
                    .unwrap();
                assert_eq!(done.stdout, input.into_bytes());
                assert_eq!(done.stderr, format!("error {number}\n").into_bytes());
                assert_eq!(done.result.status, ExitStatus::Code(number as i32 % 50));
            })
        })
        .collect();
    for task in running {
        task.await.unwrap();
    }
    assert_eq!(client.processes().await.unwrap(), []);
}

#[tokio::test]
async fn an_endless_printer_fills_nothing_and_holds_nobody_up() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let mut endless = client.exec(sh("yes")).await.unwrap();
    // The output is not read during these calls.
    for _ in 0..20 {
        assert_eq!(
            client.exec_capture(sh("echo hi")).await.unwrap().stdout,
            b"hi\n"
        );
    }
    assert!(agent.rss_kib() < 16 * 1024, "{} KiB", agent.rss_kib());
    let mut taken = 0;
    while taken < 3_000_000 {
        let Some(Output::Stdout(bytes)) = endless.next_output().await.unwrap() else {
            panic!()
        };
        assert!(
            bytes
                .chunks(2)
                .all(|pair| pair.contains(&b'y') || pair.contains(&b'\n'))
        );
        taken += bytes.len();
    }
    let pid = endless.started().pid;
    drop(endless);
    // Cancelled with its handle.
    while std::path::Path::new(&format!("/proc/{pid}")).exists() {
        client.ping().await.unwrap();
    }
}

#[tokio::test]
async fn time_output_and_signals_end_a_process() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let request = ExecRequest {
        timeout_ms: Some(50),
        ..sh("sleep 1000")
    };
    let done = client.exec_capture(request).await.unwrap();
    assert!(done.result.timed_out);
    assert_eq!(done.result.status, ExitStatus::Signal(15));
    let stubborn = "trap '' TERM; while :; do sleep 0.01; done";
    let request = ExecRequest {
        timeout_ms: Some(50),
        grace_ms: Some(50),
        ..sh(stubborn)
    };
    let done = client.exec_capture(request).await.unwrap();
    assert_eq!(
        (done.result.timed_out, done.result.status),
        (true, ExitStatus::Signal(9))
    );
    let request = ExecRequest {
        output_limit: Some(10_000),
        ..sh("yes")
    };
    let done = client.exec_capture(request).await.unwrap();
    assert!(done.result.output_limit_hit);
    // Without a shell, which may swallow an interrupt while it starts.
    let argv = vec!["sleep".into(), "1000".into()];
    let exec = client
        .exec(ExecRequest {
            argv,
            ..Default::default()
        })
        .await
        .unwrap();
    exec.signal(2);
    assert_eq!(exec.wait().await.unwrap().status, ExitStatus::Signal(2));
}

#[tokio::test]
async fn the_answer_does_not_wait_for_descendants() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let done = client
        .exec_capture(sh("(sleep 1000; echo late) & echo $!; exit 4"))
        .await
        .unwrap();
    assert_eq!(done.result.status, ExitStatus::Code(4));
    let pid: u32 = String::from_utf8_lossy(&done.stdout)
        .trim()
        .parse()
        .unwrap();
    let kill = client
        .exec_capture(sh(&format!("kill -9 {pid}")))
        .await
        .unwrap();
    assert_eq!(kill.result.status, ExitStatus::Code(0));
}

#[tokio::test]
async fn background_processes_are_listed_attached_to_and_killed() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let request = ExecRequest {
        stdin: true,
        tag: Some("cat".into()),
        ..sh("echo early; cat")
    };
    let started = client.start(request).await.unwrap();
    let listed = client.processes().await.unwrap();
    assert_eq!(
        (listed.len(), listed[0].process, listed[0].tag.as_deref()),
        (1, started.process, Some("cat"))
    );
    assert_eq!(listed[0].state, ProcessState::Running);
    // From another connection, with what was printed before.
    let other = agent.connect().await;
    let attach = AttachRequest {
        process: started.process,
        replay: true,
        stdin: true,
        since: None,
        lossless: true,
    };
    let mut attached = other.attach(attach).await.unwrap();
    attached.stdin().write(b"to the cat\n").await.unwrap();
    attached.stdin().close();
    let mut printed = Vec::new();
    while let Some(Output::Stdout(bytes)) = attached.next_output().await.unwrap() {
        printed.extend(bytes);
    }
    assert_eq!(printed, b"early\nto the cat\n");
    assert_eq!(attached.wait().await.unwrap().status, ExitStatus::Code(0));
    // Its result stays until it is forgotten.
    assert_eq!(
        client.wait(started.process).await.unwrap().status,
        ExitStatus::Code(0)
    );
    client.forget(started.process).await.unwrap();
    assert_eq!(
        client.wait(started.process).await.unwrap_err().code(),
        Some(ErrorCode::NotFound)
    );
    let sleeper = client.start(sh("sleep 1000")).await.unwrap();
    client.signal(sleeper.process, 15, true).await.unwrap();
    assert_eq!(
        client.wait(sleeper.process).await.unwrap().status,
        ExitStatus::Signal(15)
    );
    let gone = client.signal(sleeper.process, 15, true).await.unwrap_err();
    assert_eq!(gone.code(), Some(ErrorCode::Gone));
}

#[tokio::test]
async fn input_comes_in_parts_and_output_goes_on_where_it_was_left() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let by = || forkd_agent_client::Deadline::within(std::time::Duration::from_secs(30));
    let request = ExecRequest {
        stdin: true,
        ..sh("cat")
    };
    let started = client.start(request).await.unwrap();
    for (text, eof) in [("one\n", false), ("two\n", false), ("three\n", true)] {
        let part = client.input(started.process, eof).unwrap();
        part.write(text.as_bytes(), by()).await.unwrap();
        part.finish(by()).await.unwrap();
    }
    let done = client.wait(started.process).await.unwrap();
    assert_eq!(done.status, ExitStatus::Code(0));
    let since = forkd_guest_proto::OutputPosition {
        stdout: 4,
        stderr: 0,
    };
    let attach = AttachRequest {
        process: started.process,
        replay: true,
        since: Some(since),
        ..Default::default()
    };
    let mut attached = client.attach(attach).await.unwrap();
    assert_eq!(attached.started().at, since);
    let mut printed = Vec::new();
    while let Some(Output::Stdout(bytes)) = attached.next_output().await.unwrap() {
        printed.extend(bytes);
    }
    assert_eq!(printed, b"two\nthree\n");
    // A process without input refuses it, and so does one that has ended.
    let deaf = client.start(sh("sleep 1000")).await.unwrap();
    for process in [deaf.process, started.process] {
        let part = client.input(process, false).unwrap();
        let refused = part.finish(by()).await.unwrap_err();
        assert_eq!(refused.code(), Some(ErrorCode::Gone), "{process}");
    }
}

#[tokio::test]
async fn the_newest_output_is_kept_and_losses_are_told() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let request = ExecRequest {
        keep_output: Some(1000),
        ..sh("head -c 100000 /dev/zero; printf end")
    };
    let started = client.start(request).await.unwrap();
    client.wait(started.process).await.unwrap();
    let attach = AttachRequest {
        process: started.process,
        replay: true,
        ..Default::default()
    };
    let mut attached = client.attach(attach).await.unwrap();
    let Some(Output::Stdout(bytes)) = attached.next_output().await.unwrap() else {
        panic!()
    };
    assert_eq!(bytes.len(), 1000);
    assert!(bytes.ends_with(b"\0end"));
}

#[tokio::test]
async fn a_lost_connection_keeps_or_kills_as_asked() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    for (policy, survives) in [(OnDisconnect::Keep, true), (OnDisconnect::Kill, false)] {
        let short_lived = agent.connect().await;
        let request = ExecRequest {
            on_disconnect: policy,
            ..sh("echo before; sleep 1000")
        };
        let mut exec = short_lived.exec(request).await.unwrap();
        assert_eq!(
            exec.next_output().await.unwrap(),
            Some(Output::Stdout(b"before\n".to_vec()))
        );
        let started = exec.started();
        // Closed without a word about the request.
        short_lived.close();
        assert!(exec.wait().await.is_err());
        if survives {
            let attach = AttachRequest {
                process: started.process,
                replay: true,
                ..Default::default()
            };
            let mut attached = client.attach(attach).await.unwrap();
            assert_eq!(
                attached.next_output().await.unwrap(),
                Some(Output::Stdout(b"before\n".to_vec()))
            );
            client.forget(started.process).await.unwrap();
            assert_eq!(attached.wait().await.unwrap().status, ExitStatus::Signal(9));
        }
        while client
            .processes()
            .await
            .unwrap()
            .iter()
            .any(|p| p.process == started.process)
        {}
    }
}

#[tokio::test]
async fn a_terminal_is_a_terminal() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let request = ExecRequest {
        pty: Some(PtySize { rows: 30, cols: 99 }),
        ..sh(
            "tty >/dev/null && echo yes; stty size; trap 'stty size; exit 5' WINCH; read line; echo got $line; while :; do sleep 0.01; done",
        )
    };
    let mut exec = client.exec(request).await.unwrap();
    exec.stdin().write(b"typed\n").await.unwrap();
    let mut seen = String::new();
    while !seen.contains("got typed") {
        let Some(Output::Stdout(bytes)) = exec.next_output().await.unwrap() else {
            panic!("{seen}")
        };
        seen.push_str(&String::from_utf8_lossy(&bytes));
    }
    // What is typed is echoed wherever the output happens to be.
    assert!(
        seen.contains("yes\r\n") && seen.contains("30 99\r\n"),
        "{seen:?}"
    );
    exec.resize(11, 22);
    while !seen.contains("11 22") {
        let Some(Output::Stdout(bytes)) = exec.next_output().await.unwrap() else {
            panic!("{seen}")
        };
        seen.push_str(&String::from_utf8_lossy(&bytes));
    }
    assert_eq!(exec.wait().await.unwrap().status, ExitStatus::Code(5));
    // Ctrl-C reaches the foreground; the end of input reaches a reader.
    let request = ExecRequest {
        pty: Some(PtySize { rows: 5, cols: 5 }),
        argv: vec!["sleep".into(), "1000".into()],
        ..Default::default()
    };
    let exec = client.exec(request).await.unwrap();
    exec.stdin().write(&[3]).await.unwrap();
    assert_eq!(exec.wait().await.unwrap().status, ExitStatus::Signal(2));
    let request = ExecRequest {
        pty: Some(PtySize { rows: 5, cols: 5 }),
        ..sh("exec cat")
    };
    let exec = client.exec(request).await.unwrap();
    exec.stdin().close();
    assert_eq!(exec.wait().await.unwrap().status, ExitStatus::Code(0));
}

#[tokio::test]
async fn a_test_leaves_no_process() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    client.start(sh("sleep 1000")).await.unwrap();
    // Children of processes that have ended, in their own session and out of it.
    let line = "(sleep 1000 &); (setsid sleep 1000 &); sleep 1000 & exit 0";
    client.exec_capture(sh(line)).await.unwrap();
    assert!(common::orphans::below_this().len() > 4);
    drop((client, agent));
    assert_eq!(common::orphans::below_this(), []);
}
