//! The broker tries to leave its confinement, with the rights that a host may give to forkd.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A user without any right.
const PLAIN_USER: u32 = 65_534;

/// The program where every user can run it.
fn program(dir: &Path) -> PathBuf {
    let open = || std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(dir, open()).unwrap();
    let program = dir.join("forkd-broker");
    std::fs::copy(env!("CARGO_BIN_EXE_forkd-broker"), &program).unwrap();
    std::fs::set_permissions(&program, open()).unwrap();
    program
}

/// The report, if nothing was a breach.
#[track_caller]
fn held(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{:?}\n{text}{errors}",
        output.status
    );
    assert!(!text.contains("BREACH"), "{text}");
    let held = text.lines().filter(|line| line.starts_with("held")).count();
    assert!(held >= 14, "{text}");
    text
}

#[test]
fn every_wall_holds_for_root_and_for_a_plain_user() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path());
    let run = |uid: Option<u32>| {
        let mut command = Command::new(&program);
        command.arg("--self-test-jail");
        if let Some(uid) = uid {
            command.uid(uid).gid(uid);
        }
        held(&command.output().unwrap())
    };
    if rustix::process::geteuid().is_root() {
        let text = run(None);
        assert!(!text.contains("absent"), "{text}");
        assert!(text.contains("a user ID of its own"), "{text}");
        assert!(run(Some(PLAIN_USER)).contains("absent user"));
    } else {
        assert!(run(None).contains("absent user"));
    }
}
