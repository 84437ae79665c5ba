//! Requests that commands make, and answers that they show.

use std::fs;

use crate::fake_daemon::Fake;
use crate::user::User;

#[test]
fn a_host_without_certificates_can_have_a_daemon() {
    let user = User::new();
    let mut command = user.command(&["ls", "--daemon-url", "http://127.0.0.1:1"]);
    command
        .env("SSL_CERT_FILE", user.path("none"))
        .env("SSL_CERT_DIR", user.path("none"));
    let shown = user.show(command.output().unwrap());
    assert!(shown.contains("127.0.0.1:1"), "{shown}");
    assert!(!shown.contains("certificates"), "{shown}");
}

#[test]
fn how_a_command_runs_reaches_the_daemon() {
    let user = User::new();
    let fake = Fake::refusing();
    let output = user
        .command(&[
            "exec",
            "--json",
            "-e",
            "A=b=c",
            "-e",
            "PASSED_ON",
            "-w",
            "/srv",
            "-u",
            "nobody",
            "sb-1",
            "--",
            "id",
            "-u",
        ])
        .env("FORKD_URL", &fake.url)
        .env("PASSED_ON", "yes")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(125), "{}", user.show(output));
    assert_eq!(fake.seen(), ["POST /v1/sandboxes/sb-1/exec"]);
    assert_eq!(
        fake.last_body(),
        serde_json::json!({
            "args": ["id", "-u"],
            "timeout_secs": 30,
            "env": { "A": "b=c", "PASSED_ON": "yes" },
            "cwd": "/srv",
            "user": "nobody",
        })
    );
}

#[test]
fn limits_reach_the_daemon_and_a_refused_one_is_named() {
    let user = User::new();
    let fake = Fake::new(
        "400 Bad Request",
        r#"{"error": "this daemon cannot enforce limits.cpus", "code": "unsupported", "hint": "leave it out; this daemon enforces: memory_mib"}"#,
    );
    let output = user
        .command(&[
            "spawn",
            "--tag",
            "t",
            "--memory-limit",
            "1G",
            "--cpus",
            "1.5",
            "--cpu-weight",
            "50",
            "--pids-limit",
            "64",
            "--io-bytes-per-sec",
            "1048576",
            "--io-ops-per-sec",
            "100",
        ])
        .env("FORKD_URL", &fake.url)
        .output()
        .unwrap();
    insta::assert_snapshot!(user.show(output), @r"
    exit: 1
    --- stdout
    --- stderr
    error: this daemon cannot enforce limits.cpus (unsupported)

    hint: leave it out; this daemon enforces: memory_mib
    ");
    assert_eq!(
        fake.last_body()["limits"],
        serde_json::json!({
            "memory_mib": 1024,
            "cpus": 1.5,
            "cpu_weight": 50,
            "pids": 64,
            "io_bytes_per_sec": 1_048_576,
            "io_ops_per_sec": 100,
        })
    );
}

#[test]
fn children_of_a_fork_do_not_long_outlive_a_killed_command() {
    let user = User::new();
    let fake = Fake::refusing();
    let lifetime = |seconds: &str| {
        let args = ["fork", "--tag", "t", "-n", "2", "--settle-secs", seconds];
        let mut command = user.command(&args);
        command.env("FORKD_URL", &fake.url).output().unwrap();
        fake.last_body()["timeout_secs"].clone()
    };
    assert_eq!(lifetime("2"), 62);
    assert_eq!(lifetime("86400"), 600);
}

#[test]
fn limits_of_a_run_reach_the_daemon() {
    let user = User::new();
    // The snapshot is there. The same answer to the next request is an error, and ends the command.
    let snapshot = r#"{"tag": "run-python-numpy", "dir": "/", "memory_logical_bytes": 1, "memory_physical_bytes": 1, "vmstate_bytes": 1, "chain_depth": 0, "dependents": [], "ancestors": []}"#;
    let fake = Fake::new("200 OK", snapshot);
    let limits = [
        "--memory-limit",
        "512M",
        "--cpus",
        "2",
        "--pids-limit",
        "99",
    ];
    let args = [&["run", "--label", "of=me"], &limits[..], &["--", "true"]].concat();
    let mut command = user.command(&args);
    command.env("FORKD_URL", &fake.url).output().unwrap();
    assert_eq!(fake.seen().pop().unwrap(), "POST /v1/sandboxes");
    let body = fake.last_body();
    assert_eq!(
        body["limits"],
        serde_json::json!({ "memory_mib": 512, "cpus": 2.0, "pids": 99 })
    );
    assert_eq!(body["labels"], serde_json::json!({ "of": "me" }));
    assert_eq!(body["timeout_secs"], 360);
}

#[test]
fn a_run_of_another_shape_looks_for_a_snapshot_of_its_own() {
    let user = User::new();
    let fake = Fake::refusing();
    let run = |args: &[&str]| {
        let mut command = user.command(args);
        command.env("FORKD_URL", &fake.url).output().unwrap();
        fake.seen().pop().unwrap()
    };
    assert_eq!(
        run(&["run", "--", "true"]),
        "GET /v1/snapshots/run-python-numpy/info"
    );
    assert_eq!(
        run(&["run", "--vcpus", "2", "--memory", "1G", "--", "true"]),
        "GET /v1/snapshots/run.c2.m1024-python-numpy/info"
    );
}

#[test]
fn a_terminal_is_needed_for_one() {
    let user = User::new();
    insta::assert_snapshot!(user.run(&["run", "-it"]), @r"
    exit: 125
    --- stdout
    --- stderr
    error: standard input is not a terminal

    hint: use -i instead of -t to pass input from a pipe or a file
    ");
}

#[test]
fn a_refusal_says_where_it_comes_from() {
    let user = User::new();
    let fake = Fake::refusing();
    let ask = |args: &[&str]| {
        let output = user.command(args).env("FORKD_URL", &fake.url).output();
        user.show(output.unwrap())
    };
    insta::assert_snapshot!(ask(&["rollback", "sb-1"]), @r"
    exit: 1
    --- stdout
    --- stderr
    error: no sandbox sb-1 (sandbox_not_found, request r-7)

    hint: `forkd ls` lists them
    ");
    insta::assert_snapshot!(ask(&["rollback", "sb-1", "--json"]), @r#"
    exit: 1
    --- stdout
    {
      "error": "no sandbox sb-1",
      "code": "sandbox_not_found",
      "hint": "`forkd ls` lists them",
      "request_id": "r-7"
    }
    --- stderr
    "#);
    insta::assert_snapshot!(ask(&["kill", "sb-1"]), @r"
    exit: 1
    --- stdout
    ✗ sb-1 (no sandbox sb-1; sandbox_not_found, request r-7)
    --- stderr
    `forkd ls` lists them
    ");
}

#[test]
fn a_failure_of_forkd_is_told_from_one_of_the_guest() {
    let user = User::new();
    let fake = Fake::refusing();
    for args in [
        &["exec", "sb-1", "--", "true"][..],
        &["exec", "--json", "sb-1", "--", "true"],
        &["exec", "-i", "sb-1", "--", "true"],
        &["run", "--", "true"],
        &["shell", "sb-1"],
    ] {
        let mut command = user.command(args);
        let output = command.env("FORKD_URL", &fake.url).output().unwrap();
        assert_eq!(output.status.code(), Some(125), "{args:?}");
    }
}

#[test]
fn a_failure_without_an_answer_is_data_too() {
    let shown = User::new().run(&["ls", "--json", "--daemon-url", "http://127.0.0.1:1"]);
    assert!(shown.starts_with("exit: 1\n--- stdout\n{\n"), "{shown}");
    assert!(shown.ends_with("}\n--- stderr\n"), "{shown}");
    assert!(
        shown.contains(r#""error": "no daemon answers at http://127.0.0.1:1""#),
        "{shown}"
    );
}

#[test]
fn this_host_is_not_asked_through_a_proxy() {
    let user = User::new();
    let fake = Fake::new("200 OK", "[]");
    for name in ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"] {
        let mut command = user.command(&["ls", "--daemon-url", &fake.url]);
        let output = command.env(name, "http://127.0.0.1:1").output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", user.show(output));
    }
}

#[test]
fn an_empty_variable_counts_as_not_set() {
    let user = User::new();
    let fake = Fake::new("200 OK", "[]");
    let mut command = user.command(&["ls", "--daemon-url", &fake.url]);
    for name in [
        "FORKD_URL",
        "FORKD_TOKEN",
        "FORKD_CACERT",
        "FORKD_MACHINE",
        "FORKD_TAP",
    ] {
        command.env(name, "");
    }
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", user.show(output));
    let mut command = user.command(&["machine", "status"]);
    let shown = user.show(command.env("FORKD_MACHINE", "").output().unwrap());
    assert!(shown.contains("machine       default\n"), "{shown}");
}

#[test]
fn what_is_typed_comes_before_what_is_in_the_environment() {
    let user = User::new();
    let snapshot =
        r#"{"tag": "t", "dir": "/d", "created_at_unix": 1, "status": "ready", "bootable": true}"#;
    let fake = Fake::new("201 Created", snapshot);
    for args in [
        &["snapshot", "--tag", "t", "--image", "x"][..],
        &["snapshot", "--tag", "t", "--from-sandbox", "sb-1"],
        &["snapshot", "--tag", "t"],
    ] {
        let output = user
            .command(args)
            .env("FORKD_URL", &fake.url)
            .env("FORKD_ROOTFS", "/r")
            .env("FORKD_KERNEL", "/k")
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", user.show(output));
    }
}

#[test]
fn a_certificate_that_is_none_is_named_by_the_doctor() {
    let user = User::new();
    let path = user.path("none.pem");
    let shown = user.run(&["doctor", "--daemon-cacert", path.to_str().unwrap()]);
    assert!(shown.contains("cannot read [HOME]/none.pem"), "{shown}");
    assert!(!shown.contains("http://HOST:PORT"), "{shown}");
}

#[test]
fn a_checkpoint_that_is_forgotten_is_data_too() {
    let user = User::new();
    let fake = Fake::new("204 No Content", "");
    let args = ["checkpoint", "sb-1", "--rm", "before", "--json"];
    let output = user.command(&args).env("FORKD_URL", &fake.url).output();
    insta::assert_snapshot!(user.show(output.unwrap()), @r#"
    exit: 0
    --- stdout
    {
      "name": "before",
      "ok": true
    }
    --- stderr
    "#);
}

#[test]
fn half_a_file_is_none() {
    let user = User::new();
    let target = user.path("file");
    let copy = |fake: &Fake| {
        let args = ["cp", "--json", "sb-1:/etc/file", target.to_str().unwrap()];
        let output = user.command(&args).env("FORKD_URL", &fake.url).output();
        user.show(output.unwrap())
    };
    let shown = copy(&Fake::declaring("200 OK", "half", 8));
    assert!(shown.starts_with("exit: 1\n"), "{shown}");
    assert_eq!(fs::read_dir(user.path("")).unwrap().count(), 0, "{shown}");
    insta::assert_snapshot!(copy(&Fake::new("200 OK", "whole")), @r#"
    exit: 0
    --- stdout
    {
      "path": "[HOME]/file",
      "bytes": 5
    }
    --- stderr
    "#);
    assert_eq!(fs::read_to_string(&target).unwrap(), "whole");
}

/// A sandbox as the daemon shows it, with a limit on its memory.
const LIMITED: &str = r#"{"id": "sb-1", "snapshot_tag": "py", "state": "running", "guest_addr": "",
    "created_at_unix": 0, "has_branched": false, "branch_count": 0, "memory_mib": 64, "vcpus": 1, "limits": {"memory_mib": 512}}"#;

#[test]
fn limits_of_a_live_sandbox_are_shown_changed_and_lifted() {
    let user = User::new();
    let fake = Fake::new("200 OK", LIMITED);
    let limits = |args: &[&str]| {
        let mut command = user.command(&["limits", "sb-1"]);
        let output = command.args(args).env("FORKD_URL", &fake.url).output();
        (user.show(output.unwrap()), fake.seen().pop().unwrap())
    };
    let (shown, request) = limits(&[]);
    assert_eq!(request, "GET /v1/sandboxes/sb-1");
    insta::assert_snapshot!(shown, @r"
    exit: 0
    --- stdout
    memory-limit: 512M
    cpus: none
    cpu-weight: none
    pids-limit: none
    io-bytes-per-sec: none
    io-ops-per-sec: none
    --- stderr
    ");
    let (_, request) = limits(&["--cpus", "0.5"]);
    assert_eq!(request, "PATCH /v1/sandboxes/sb-1");
    let sent = fake.last_body()["limits"].clone();
    assert_eq!(sent, serde_json::json!({"memory_mib": 512, "cpus": 0.5}));
    limits(&["--clear", "--cpus", "2"]);
    let sent = fake.last_body()["limits"].clone();
    assert_eq!(sent, serde_json::json!({"cpus": 2.0}));
}

#[test]
fn the_freeze_of_processes_reaches_the_daemon() {
    let user = User::new();
    let fake = Fake::refusing();
    let commands: [&[&str]; 3] = [
        &["branch", "sb-1", "--freeze"],
        &["spawn", "--sandbox", "sb-1", "--freeze"],
        &["fork", "--sandbox", "sb-1", "-n", "1", "--freeze"],
    ];
    for args in commands {
        let mut command = user.command(args);
        command.env("FORKD_URL", &fake.url).output().unwrap();
        assert_eq!(fake.last_body()["freeze"], true, "{args:?}");
    }
}
