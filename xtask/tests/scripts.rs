//! The functions of `scripts/lib.sh`, and what every script relies on.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Stdio};

fn alive(pid: &str) -> bool {
    // A zombie that waits for its parent has ended, too.
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        !stat
            .rsplit(')')
            .next()
            .is_some_and(|rest| rest.starts_with(" Z"))
    })
}

/// Runs a script that runs a script that runs a program with a child. The signal goes to the outermost script
/// only.
fn interrupted_by(signal: &str) {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let inner = dir.path().join("inner.sh");
    let lib = top.join("scripts/lib.sh");
    let lib = lib.display();
    fs::write(
        &inner,
        format!(
            "source {lib}\nat_end 'echo inner ended'\nnested() {{ run bash -c 'sleep 600 & echo $$ $!; wait'; }}\nrun nested\n"
        ),
    )
    .unwrap();
    let mut outer = Command::new("bash")
        .arg("-c")
        .arg(format!(
            "source {lib}\nat_end 'echo outer ended'\nrun bash {}\n",
            inner.display()
        ))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .unwrap();
    let mut output = BufReader::new(outer.stdout.take().unwrap()).lines();
    let pids = output.next().unwrap().unwrap();
    let pids: Vec<&str> = pids.split_whitespace().collect();
    assert!(pids.iter().all(|pid| alive(pid)));

    let kill = Command::new("kill")
        .args([signal, &outer.id().to_string()])
        .status()
        .unwrap();
    assert!(kill.success());
    let status = outer.wait().unwrap();
    assert!(status.signal().is_some(), "{status}");
    assert!(
        pids.iter().all(|pid| !alive(pid)),
        "{pids:?} outlived the script"
    );
    let said: Vec<String> = output.map_while(Result::ok).collect();
    assert_eq!(said, ["inner ended", "outer ended"]);
}

#[test]
fn interrupt_ends_everything() {
    interrupted_by("-INT");
}

#[test]
fn terminate_ends_everything() {
    interrupted_by("-TERM");
}

#[test]
fn a_failing_step_gives_its_status() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let output = Command::new("bash")
        .arg("-c")
        .arg("source scripts/lib.sh; at_end 'echo ended'; step name bash -c 'exit 7'; echo not reached")
        .current_dir(top)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ended\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("name: failed with status 7"));
}

#[test]
fn the_slowest_part_comes_first() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let parts = tempfile::NamedTempFile::new().unwrap();
    let output = Command::new("bash")
        .arg("-c")
        .arg("source scripts/lib.sh; took short 900; took 'of three words' 61500; took middle 2000; slowest 2")
        .current_dir(top)
        .env("FORKD_PARTS", parts.path())
        .output()
        .unwrap();
    assert!(output.status.success());
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        said,
        "slowest parts:\n        61.5 s  of three words\n         2.0 s  middle\n"
    );
}

/// More parts than a pipe holds: no command may end because its reader has left.
#[test]
fn many_parts_do_not_end_the_run() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let parts = tempfile::NamedTempFile::new().unwrap();
    let lines: String = (0..20_000).map(|n| format!("{n}\tpart {n}\n")).collect();
    std::fs::write(parts.path(), lines).unwrap();
    let output = Command::new("bash")
        .args(["-c", "source scripts/lib.sh; slowest 1"])
        .current_dir(top)
        .env("FORKD_PARTS", parts.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", output.status);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said, "slowest parts:\n        20.0 s  part 19999\n");
}

/// A doctor that finds a problem exits with 1, and a run must not end there.
#[test]
fn the_probe_is_one_word_of_the_doctor() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let target = tempfile::tempdir().unwrap();
    fs::create_dir(target.path().join("release")).unwrap();
    let probe = |report: &str| {
        let forkd = target.path().join("release/forkd");
        fs::write(
            &forkd,
            format!("#!/bin/sh\ncat <<'END'\n{report}\nEND\nexit 1\n"),
        )
        .unwrap();
        fs::set_permissions(&forkd, fs::Permissions::from_mode(0o755)).unwrap();
        Command::new("bash")
            .args([
                "-c",
                "source scripts/lib.sh; kvm=$(probe_kvm); echo \"$kvm\"",
            ])
            .current_dir(top)
            .env("CARGO_TARGET_DIR", target.path())
            .output()
            .unwrap()
    };
    let report = r#"{
  "checks": [
    {
      "name": "kernel",
      "verdict": "pass",
      "detail": "6.12"
    },
    {
      "name": "kvm",
      "verdict": "fail",
      "detail": "interpreting, 80.1 ns per loop in guest kernel mode",
      "hint": "use `forkd machine start`"
    }
  ]
}"#;
    assert_eq!(
        String::from_utf8(probe(report).stdout).unwrap(),
        "interpreting\n"
    );
    let silent = probe("{}");
    assert_eq!(silent.status.code(), Some(1));
    assert_eq!(silent.stdout, b"");
}

/// Packages with their features, as cargo resolves them for the whole workspace.
fn resolved(edges: &str) -> BTreeSet<String> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--locked", "--workspace", "-e", edges])
        .args(["--prefix", "none", "-f", "{p} [{f}]"])
        .current_dir(top)
        // A resolver that is told to unify over the workspace hides what this test looks for.
        .env_remove("CARGO_RESOLVER_FEATURE_UNIFICATION")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let lines = String::from_utf8(output.stdout).unwrap();
    lines
        .lines()
        .map(|line| line.trim_end_matches(" (*)").to_owned())
        .filter(|line| !line.is_empty())
        .collect()
}

/// A feature that only a dev-dependency asks for makes cargo compile the package, and all that use it, a second time for
/// the tests. The remedy is to ask for it outside of dev-dependencies too, as `forkd-testkit` does for regex-syntax, or to
/// do without it.
#[test]
fn a_build_with_tests_shares_every_package_with_one_without() {
    let without = resolved("normal,build");
    let with = resolved("normal,build,dev");
    let twice: Vec<&String> = without.difference(&with).collect();
    assert!(twice.is_empty(), "compiled twice: {twice:#?}");
}

#[test]
fn every_script_parses() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for entry in fs::read_dir(top.join("scripts")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "sh") {
            let status = Command::new("bash").arg("-n").arg(&path).status().unwrap();
            assert!(status.success(), "{}", path.display());
        }
    }
}
