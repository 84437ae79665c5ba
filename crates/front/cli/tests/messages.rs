//! Text, streams and exit codes of commands that need no running machine and no daemon but a fake one.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

/// A user with an empty home directory. The only QEMU is the one that a test makes.
struct User {
    home: tempfile::TempDir,
}

impl User {
    fn new() -> Self {
        Self {
            home: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forkd"));
        command
            .args(args)
            .env_clear()
            .env("HOME", self.home.path())
            .stdin(Stdio::null());
        // Tools such as mke2fs; the folder of the programs has none of ours.
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("FORKD_PROGRAMS", self.path("programs"));
        command.env("FORKD_QEMU", self.path("qemu"));
        command
    }

    fn run(&self, args: &[&str]) -> String {
        self.show(self.command(args).output().unwrap())
    }

    /// Exit code, stdout and stderr, with the home directory taken out.
    fn show(&self, output: Output) -> String {
        let text = |bytes: &[u8]| {
            String::from_utf8_lossy(bytes)
                .replace(&self.home.path().display().to_string(), "[HOME]")
        };
        format!(
            "exit: {}\n--- stdout\n{}--- stderr\n{}",
            output.status.code().unwrap_or(-1),
            text(&output.stdout),
            text(&output.stderr)
        )
    }

    /// A QEMU that answers `--version` and runs `script` otherwise.
    fn qemu(&self, version: &str, script: &str) {
        let text = format!(
            "#!/bin/sh\nif [ \"$1\" = --version ]; then echo 'QEMU emulator version {version}'; exit; fi\n{script}\n"
        );
        executable(&self.path("qemu"), &text);
    }

    /// A folder that passes for a machine image.
    fn image(&self) -> PathBuf {
        let folder = self.path("image");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("image.json"), r#"{"schema":1,"kernel":"6.12"}"#).unwrap();
        for part in ["vmlinuz", "initramfs.cpio", "root.ext4"] {
            fs::write(folder.join(part), "").unwrap();
        }
        folder
    }
}

fn executable(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// An unused port: the default one may be in use on the host that runs the tests.
const START: [&str; 8] = [
    "machine", "start", "--accel", "tcg", "--disk", "64M", "--port", "47113",
];

#[test]
fn exec_without_a_machine() {
    insta::assert_snapshot!(User::new().run(&["machine", "exec", "--", "true"]), @r#"
    exit: 125
    --- stdout
    --- stderr
    error: machine "default" is not running

    hint: start it with `forkd machine start`
    "#);
}

#[test]
fn the_hint_names_the_machine() {
    insta::assert_snapshot!(User::new().run(&["machine", "shell", "--name", "other"]), @r#"
    exit: 125
    --- stdout
    --- stderr
    error: machine "other" is not running

    hint: start it with `forkd machine start --name other`
    "#);
}

#[test]
fn status_of_nothing() {
    insta::assert_snapshot!(User::new().run(&["machine", "status"]), @r"
    exit: 1
    --- stdout
    machine       default
    state         absent (make one with `forkd machine start`)
    files         [HOME]/.local/state/forkd/machine/default
    --- stderr
    ");
}

#[test]
fn status_as_json() {
    insta::assert_snapshot!(User::new().run(&["machine", "status", "--json"]), @r#"
    exit: 1
    --- stdout
    {
      "name": "default",
      "state": "absent",
      "folder": "[HOME]/.local/state/forkd/machine/default",
      "console": "[HOME]/.local/state/forkd/machine/default/console.log",
      "disk_used_mib": 0
    }
    --- stderr
    "#);
}

#[test]
fn stop_and_rm_of_nothing_are_fine() {
    let user = User::new();
    insta::assert_snapshot!(user.run(&["machine", "stop"]), @r"
    exit: 0
    --- stdout
    --- stderr
    machine default is not running
    ");
    insta::assert_snapshot!(user.run(&["machine", "rm"]), @r"
    exit: 0
    --- stdout
    --- stderr
    there is no machine default
    ");
    insta::assert_snapshot!(user.run(&["machine", "rm", "--json"]), @r#"
    exit: 0
    --- stdout
    {
      "name": "default",
      "removed": false
    }
    --- stderr
    "#);
}

#[test]
fn no_qemu() {
    insta::assert_snapshot!(User::new().run(&START), @r"
    exit: 1
    --- stdout
    --- stderr
    error: qemu-system-x86_64 was not found

    hint: run `make setup`, or install qemu-system-x86 (version 10 or newer); FORKD_QEMU names one elsewhere
    ");
}

#[test]
fn a_qemu_that_is_too_old() {
    let user = User::new();
    user.qemu("7.2.19 (Debian 1:7.2+dfsg-7)", "exit 1");
    insta::assert_snapshot!(user.run(&START), @r"
    exit: 1
    --- stdout
    --- stderr
    error: [HOME]/qemu is version 7.2.19; version 10 or newer is needed

    hint: run `make setup`: on Debian 12 a new QEMU comes from the backports suite; FORKD_QEMU names one elsewhere
    ");
}

#[test]
fn no_image_builder() {
    let user = User::new();
    user.qemu("10.0.2", "exit 1");
    insta::assert_snapshot!(user.run(&START), @r"
    exit: 1
    --- stdout
    --- stderr
    looking for the machine image …
    error: forkd-image was not found beside forkd or in PATH

    hint: run `make build`, which leaves it beside forkd
    ");
}

#[test]
fn an_image_builder_that_fails() {
    let user = User::new();
    user.qemu("10.0.2", "exit 1");
    fs::create_dir(user.path("programs")).unwrap();
    executable(
        &user.path("programs/forkd-image"),
        "#!/bin/sh\necho 'fetching packages' >&2\necho 'error: no mirror' >&2\nexit 1\n",
    );
    insta::assert_snapshot!(user.run(&START), @r"
    exit: 1
    --- stdout
    --- stderr
    looking for the machine image …
      fetching packages
      error: no mirror
    error: the machine image could not be built: fetching packages; error: no mirror
    ");
}

#[test]
fn a_taken_port() {
    let user = User::new();
    user.qemu(
        "10.0.2",
        "echo \"qemu: Could not set up host forwarding rule 'tcp'\" >&2; exit 1",
    );
    let output = user
        .command(&START)
        .env("FORKD_MACHINE_IMAGE", user.image())
        .output()
        .unwrap();
    insta::assert_snapshot!(user.show(output), @r"
    exit: 1
    --- stdout
    --- stderr
    looking for the machine image …
    booting (software emulation: correct, about 15 times slower) …
    error: port 47113 of 127.0.0.1 is in use

    hint: choose another with --port, or let one be chosen with --port 0
    ");
    // Nothing of the attempt is left but the disk, and the console if there was one.
    let folder = user.path(".local/state/forkd/machine/default");
    let mut left: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["data.img"]);
}

#[test]
fn a_record_of_a_machine_that_is_gone() {
    let user = User::new();
    let folder = user.path(".local/state/forkd/machine/default");
    fs::create_dir_all(&folder).unwrap();
    let record = r#"{"schema":1,"instance":"i","qemu":{"pid":1,"start_ticks":99999999999},"qemu_version":"10",
        "accel":"tcg","accel_reason":"","cpus":1,"memory":1,"disk":1,"api_port":1,"agent_port":1,"image":"",
        "started_unix_ms":1}"#;
    fs::write(folder.join("machine.json"), record).unwrap();
    fs::write(folder.join("qemu.pid"), "1\n").unwrap();
    let shown = user.run(&["machine", "status"]);
    assert!(shown.contains("state         stopped\n"), "{shown}");
    let stopped = user.run(&["machine", "stop"]);
    assert!(
        stopped.contains("machine default is not running"),
        "{stopped}"
    );
    assert!(!folder.join("machine.json").exists());
}

#[test]
fn a_record_that_cannot_be_read() {
    let user = User::new();
    let folder = user.path(".local/state/forkd/machine/default");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("machine.json"), r#"{"schema":9}"#).unwrap();
    insta::assert_snapshot!(user.run(&["machine", "status"]), @r"
    exit: 1
    --- stdout
    --- stderr
    error: the record [HOME]/.local/state/forkd/machine/default/machine.json is not readable
      caused by: it has format 9; this version reads format 1

    hint: remove the machine with `forkd machine rm --force`
    ");
    let removed = user.run(&["machine", "rm", "--force"]);
    assert!(removed.contains("machine default is removed"), "{removed}");
    assert!(!folder.exists());
}

#[test]
fn wrong_usage_is_exit_code_2() {
    let user = User::new();
    for args in [
        &["machine", "start", "--accel", "warp"][..],
        &["machine", "start", "--memory", "lots"],
        &["machine", "start", "--name", "../x"],
        &["machine", "exec"],
        &["machine", "exec", "-e", "bad", "--", "true"],
        &["machine"],
        &["exec", "-e", "bad", "sb-1", "--", "true"],
        &["exec", "-e", "=bad", "sb-1", "--", "true"],
        &["exec", "-i", "--json", "sb-1", "--", "true"],
        &["exec", "-i", "--timeout-secs", "9", "sb-1", "--", "true"],
        &["exec", "-t", "--json", "sb-1", "--", "true"],
        &["run"],
        &["run", "-i"],
        &["run", "-i", "--json", "--", "true"],
        &["run", "-t", "--timeout-secs", "9"],
        &["run", "--keep", "--rm", "--", "true"],
        &["run", "--vcpus", "0", "--", "true"],
        &["run", "--memory", "lots", "--", "true"],
        &["run", "--cpus", "0", "--", "true"],
        &["run", "-e", "NOT_SET_HERE", "--", "true"],
        &["run", "--label", "bad", "--", "true"],
        &["spawn", "--sandbox", "sb-1", "--memory-limit", "1G"],
        &["spawn", "--sandbox", "sb-1", "--cpus", "1"],
        &["spawn", "--tag", "x", "--label", "bad"],
        &[
            "fork",
            "--sandbox",
            "sb-1",
            "-n",
            "1",
            "--memory-limit-mib",
            "9",
        ],
        &["fork", "--sandbox", "sb-1", "-n", "1", "--per-child-netns"],
        &["snapshot", "--from-sandbox", "sb-1", "--warmup", "true"],
        &["snapshot", "--from-sandbox", "sb-1", "--warmup-code", "1"],
        &["snapshot", "--from-sandbox", "sb-1", "--vcpus", "2"],
        &[
            "snapshot",
            "--from-sandbox",
            "sb-1",
            "--mem-size-mib",
            "512",
        ],
        &["snapshot", "--from-sandbox", "sb-1", "--kernel", "/k"],
        &["snapshot", "--from-sandbox", "sb-1", "--rootfs", "/r"],
        &["snapshot", "--from-sandbox", "sb-1", "--image", "x"],
        &["snapshot", "--tag", "x", "--image", "x", "--rootfs", "/r"],
        &["frobnicate"],
        &[],
    ] {
        let output = user.command(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty(), "{args:?} wrote to stdout");
    }
}

#[test]
fn where_things_are() {
    let user = User::new();
    let data = if rustix::process::geteuid().is_root() {
        "/var/lib/forkd"
    } else {
        "[HOME]/.local/share/forkd"
    };
    assert_eq!(
        user.run(&["where"]),
        format!("exit: 0\n--- stdout\n{data}\n--- stderr\n")
    );
    let output = user
        .command(&["where"])
        .env_remove("HOME")
        .output()
        .unwrap();
    insta::assert_snapshot!(user.show(output), @r"
    exit: 1
    --- stdout
    --- stderr
    error: no home directory: neither HOME nor the XDG variables are set

    hint: set HOME, or XDG_DATA_HOME, XDG_CACHE_HOME and XDG_STATE_HOME
    ");
}

/// The names below `Commands:` in a help text.
fn listed(help: &str) -> Vec<String> {
    help.lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_whitespace().next())
        .map(str::to_owned)
        .collect()
}

#[test]
fn completions_and_manual_know_every_command() {
    let user = User::new();
    let print = |args: &[&str]| {
        let output = user.command(args).output().unwrap();
        assert!(output.status.success(), "{args:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let names = listed(&print(&["--help"]));
    assert!(names.len() > 25, "{names:?}");
    for args in [
        &["completions", "bash"][..],
        &["completions", "fish"],
        &["completions", "zsh"],
        &["man"],
    ] {
        // A manual page writes a hyphen so that it stays one.
        let text = print(args).replace("\\-", "-");
        let words: Vec<&str> = text
            .split(|c: char| !c.is_ascii_alphanumeric() && c != '-')
            .map(|word| word.strip_prefix("forkd-").unwrap_or(word))
            .collect();
        for name in &names {
            assert!(
                words.contains(&name.as_str()),
                "{args:?} does not know {name}"
            );
        }
    }
    let folder = user.path("man");
    print(&["man", "--out", folder.to_str().unwrap()]);
    for name in &names {
        let page = |name: &str| folder.join(format!("forkd-{name}.1")).exists();
        assert!(page(name), "{name} has no page");
        if name == "bench" {
            continue;
        }
        for below in listed(&print(&[name, "--help"])) {
            assert!(
                page(&format!("{name}-{below}")),
                "{name} {below} has no page"
            );
        }
    }
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    let user = User::new();
    for args in [&["completions", "zsh"][..], &["man"], &["where", "--json"]] {
        let mut child = user
            .command(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}");
        assert!(
            output.stderr.is_empty(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

#[test]
fn colour_is_for_terminals() {
    let shown = User::new().run(&["machine", "exec", "--", "true"]);
    assert!(!shown.contains('\x1b'), "{shown:?}");
}

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

/// A server on this host that gives every request the same answer, and records the requests.
struct Fake {
    url: String,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Fake {
    fn new(status: &str, body: &str) -> Self {
        Self::declaring(status, body, body.len())
    }

    /// An answer with this content length.
    fn declaring(status: &str, body: &str, length: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let answer = format!(
            "HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
        );
        let requests = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&requests);
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let Ok(mut connection) = connection else {
                    return;
                };
                let mut request = Vec::new();
                let mut chunk = [0; 4096];
                while !is_whole(&request) {
                    match connection.read(&mut chunk) {
                        Ok(length @ 1..) => request.extend_from_slice(&chunk[..length]),
                        _ => break,
                    }
                }
                let text = String::from_utf8_lossy(&request).into_owned();
                kept.lock().unwrap().push(text);
                let _ = connection.write_all(answer.as_bytes());
                // Closing a socket with unread data resets the connection, and the client would lose the answer.
                let _ = connection.shutdown(Shutdown::Write);
                while matches!(connection.read(&mut chunk), Ok(1..)) {}
            }
        });
        Self { url, requests }
    }

    /// Method and path of each request so far.
    fn seen(&self) -> Vec<String> {
        let requests = self.requests.lock().unwrap();
        let line = |text: &String| text.split(" HTTP/").next().unwrap().to_owned();
        requests.iter().map(line).collect()
    }

    /// The body of the last request.
    fn last_body(&self) -> serde_json::Value {
        let requests = self.requests.lock().unwrap();
        let (_, body) = requests.last().unwrap().split_once("\r\n\r\n").unwrap();
        serde_json::from_str(body).unwrap()
    }

    /// A daemon without sandboxes.
    fn refusing() -> Self {
        Self::new(
            "404 Not Found",
            r#"{"error": "no sandbox sb-1", "code": "sandbox_not_found", "hint": "`forkd ls` lists them", "request_id": "r-7"}"#,
        )
    }
}

/// Whether head and body of a request have arrived.
fn is_whole(request: &[u8]) -> bool {
    let text = String::from_utf8_lossy(request).to_lowercase();
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        return false;
    };
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
    body.len() >= length.unwrap_or(0)
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
fn a_limit_that_is_not_kept_is_said() {
    let user = User::new();
    let child = r#"[{"id": "sb-1", "snapshot_tag": "t", "netns": null, "guest_addr": "10.42.0.2:8888",
        "created_at_unix": 1, "pid": 2, "memory_limit_mib": null, "has_branched": false,
        "last_branch_memory_path": null, "branch_count": 0, "state": "running", "ready_us": 1500}]"#;
    let fake = Fake::new("201 Created", child);
    let args = ["spawn", "--tag", "t", "--memory-limit-mib", "300"];
    let output = user.command(&args).env("FORKD_URL", &fake.url).output();
    insta::assert_snapshot!(user.show(output.unwrap()), @r"
    exit: 0
    --- stdout
    ✓ sb-1 ready=1.5ms
    --- stderr
    warning: 1 of 1 sandboxes run without the memory limit of 300 MiB; the daemon's log says why it could not be set
    ");
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
