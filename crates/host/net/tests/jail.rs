//! The engine tries to leave its confinement, with the rights that a host may give to forkd.

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
    let program = dir.join("forkd-net");
    std::fs::copy(env!("CARGO_BIN_EXE_forkd-net"), &program).unwrap();
    std::fs::set_permissions(&program, open()).unwrap();
    program
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
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
    assert!(held >= 16, "{text}");
    text
}

/// As the systemd unit runs forkd, and as root without a limit.
#[test]
fn root_puts_up_every_wall() {
    if !is_root() {
        eprintln!("not root: the walls of a plain user are tested instead");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path());
    for bounding in ["+sys_admin", "-sys_admin,-sys_chroot,-setpcap"] {
        let output = Command::new("setpriv")
            .args(["--bounding-set", bounding, "--"])
            .arg(&program)
            .arg("--self-test-jail")
            .output()
            .expect("setpriv of util-linux");
        let text = held(&output);
        assert!(!text.contains("absent"), "{text}");
        assert!(text.contains("a user ID of its own"), "{text}");
    }
}

#[test]
fn a_plain_user_has_every_wall_but_the_user() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(program(dir.path()));
    command.arg("--self-test-jail");
    if is_root() {
        command.uid(PLAIN_USER).gid(PLAIN_USER);
    }
    let text = held(&command.output().unwrap());
    let absent: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("absent"))
        .collect();
    assert!(
        matches!(absent[..], [user] if user.starts_with("absent user")),
        "{text}"
    );
}
