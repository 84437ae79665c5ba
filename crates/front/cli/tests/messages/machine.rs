//! Commands of the machine, without a running one.

use std::fs;

use crate::user::{User, executable};

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
