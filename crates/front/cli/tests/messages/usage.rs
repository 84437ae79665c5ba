//! Usage, help texts, streams and colours.

use std::process::Stdio;

use crate::user::User;

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
        // Programs of their own, which are not beside this test.
        if matches!(name.as_str(), "bench" | "gateway") {
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
