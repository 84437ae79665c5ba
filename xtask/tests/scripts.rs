//! Interrupts scripts and checks that every process that they started has ended.

use std::fs;
use std::io::{BufRead, BufReader};
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
