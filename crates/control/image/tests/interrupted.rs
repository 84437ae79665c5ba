//! Builds that are killed half-way, and builds that happen twice at once, seen from outside: the
//! real program with a stand-in for mmdebstrap, so that no network is needed.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// A folder with a stand-in, a recipe and a cache.
struct Bench {
    folder: tempfile::TempDir,
}

/// Makes a root with one file in it, and notes that it ran. With a file `block` beside it, it says
/// who it is and waits for ever.
const STAND_IN: &str = r#"#!/bin/sh
set -eu
here=$(dirname "$0")/..
echo run >> "$here/runs"
for arg in "$@"; do
    case $arg in */root.tar) archive=$arg ;; esac
done
root=$TMPDIR/root
mkdir -p "$root/var/lib/dpkg"
if [ -e "$here/block" ]; then
    echo $$ > "$here/pid"
    echo "I: downloading packages with apt..." >&2
    exec sleep 1000
fi
printf 'Package: base\nStatus: install ok installed\nVersion: 1\n' > "$root/var/lib/dpkg/status"
tar -C "$root" -cf "$archive" .
"#;

const RECIPE: &str = "schema = 1\nname = \"small\"\ndisk_mib = 64\nmemory_mib = 64\nvcpus = 1\n\
    [base]\ndebian = \"trixie\"\n";

impl Bench {
    fn new() -> Self {
        let bench = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        std::fs::create_dir(bench.path("bin")).unwrap();
        let program = bench.path("bin/mmdebstrap");
        std::fs::write(&program, STAND_IN).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::write(bench.path("recipe.toml"), RECIPE).unwrap();
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self) -> Command {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new(env!("CARGO_BIN_EXE_forkd-image"));
        command
            .args(["--json", "--mirror", "file:/nonexistent", "build"])
            .arg(self.folder.path())
            .env("PATH", format!("{}:{path}", self.path("bin").display()))
            .env("XDG_CACHE_HOME", self.path("cache"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn build(&self) -> serde_json::Value {
        answer(&self.command().output().unwrap())
    }

    fn runs(&self) -> usize {
        let text = std::fs::read_to_string(self.path("runs")).unwrap_or_default();
        text.lines().count()
    }

    fn staging(&self) -> usize {
        let folder = self.path("cache/forkd/image/staging");
        std::fs::read_dir(folder).unwrap().count()
    }
}

fn answer(output: &Output) -> serde_json::Value {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Reads the program's progress until the stand-in has spoken.
fn wait_until_busy(child: &mut Child) {
    let stderr = BufReader::new(child.stderr.take().unwrap());
    let mut lines = stderr.lines().map(Result::unwrap);
    let busy = lines.any(|line| line.contains("downloading packages"));
    assert!(busy, "the build ended early");
}

/// Waits for a process that is not a child of ours to be gone.
fn wait_until_gone(pid: &str) {
    let pid = rustix::process::Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
    let flags = rustix::process::PidfdFlags::empty();
    let Ok(handle) = rustix::process::pidfd_open(pid, flags) else {
        return;
    };
    let mut fds = [rustix::event::PollFd::new(
        &handle,
        rustix::event::PollFlags::IN,
    )];
    let limit = rustix::time::Timespec {
        tv_sec: 60,
        tv_nsec: 0,
    };
    let ready = rustix::event::poll(&mut fds, Some(&limit)).unwrap();
    assert_eq!(ready, 1, "the stand-in outlives the killed build");
}

#[test]
fn a_killed_build_leaves_nothing_running_and_the_next_one_cleans_up() {
    let bench = Bench::new();
    std::fs::write(bench.path("block"), "").unwrap();
    let mut child = bench.command().spawn().unwrap();
    wait_until_busy(&mut child);
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until_gone(&std::fs::read_to_string(bench.path("pid")).unwrap());
    assert_eq!(bench.staging(), 1);

    std::fs::remove_file(bench.path("block")).unwrap();
    let made = bench.build();
    assert_eq!(bench.staging(), 0);
    let disk = Path::new(made["disk"].as_str().unwrap());
    assert_eq!(std::fs::metadata(disk).unwrap().len(), 64 << 20);
    assert_eq!(made["packages"], 1);
    assert_eq!(bench.runs(), 2);

    assert_eq!(bench.build(), made);
    assert_eq!(bench.runs(), 2, "what is in the cache is not made again");
}

#[test]
fn two_at_once_build_once() {
    let bench = Bench::new();
    let children = [bench.command(), bench.command()].map(|mut command| command.spawn().unwrap());
    let answers = children.map(|child| answer(&child.wait_with_output().unwrap()));
    assert_eq!(answers[0], answers[1]);
    assert_eq!(bench.runs(), 1);
    assert_eq!(bench.staging(), 0);
}

#[test]
fn a_missing_program_is_named_with_the_remedy() {
    let bench = Bench::new();
    std::fs::remove_file(bench.path("bin/mmdebstrap")).unwrap();
    // A path with everything but mmdebstrap.
    let tools = bench.path("tools");
    std::fs::create_dir(&tools).unwrap();
    for name in ["setpriv", "apt-config"] {
        let found = Command::new("sh")
            .args(["-c", &format!("command -v {name}")])
            .output()
            .unwrap();
        let found = String::from_utf8(found.stdout).unwrap();
        std::os::unix::fs::symlink(found.trim(), tools.join(name)).unwrap();
    }
    let output = bench.command().env("PATH", &tools).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr.contains("mmdebstrap is not installed"), "{stderr}");
    assert!(stderr.contains("hint: run `make setup`"), "{stderr}");
}
