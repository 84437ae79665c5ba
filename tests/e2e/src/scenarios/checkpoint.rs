//! A Python session rolls back to earlier checkpoints.
//!
//! Open files, child processes and interpreter state are those of the checkpoint, in any order of roll-backs.

use anyhow::{Context, ensure};
use forkd_testkit::{BootOptions, Point, Vm};

use crate::scenario::{Registered, Run, everyday, times};
use crate::support::warm_python;

pub const SCENARIOS: &[Registered] = &[everyday!(a_session_is_what_it_was)];

/// Open files, a child process, and what can be said of them.
const SESSION: &str = r#"
import hashlib, os, subprocess
steps = []
log = open('/root/session.log', 'w+')
child = subprocess.Popen(['sh', '-c', 'while read line; do echo "$line $$"; done'],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
def ask(word):
    child.stdin.write(word + '\n'); child.stdin.flush()
    return child.stdout.readline().split()
def step(n):
    steps.append(bytes([n % 251]) * 200_000)
    log.write('step %d\n' % n); log.flush(); os.fsync(log.fileno())
    open('/root/step-%d' % n, 'w').write(str(n))
def look():
    here = hashlib.sha256(b''.join(steps)).hexdigest()
    with open('/root/session.log') as f:
        text = f.read()
    files = sorted(name for name in os.listdir('/root') if name.startswith('step-'))
    return [here, log.tell(), text, files, ask('there'), child.pid]
def wreck():
    steps.clear(); log.truncate(0); log.close(); child.kill(); child.wait()
    for name in os.listdir('/root'):
        if name.startswith('step-'):
            os.remove('/root/' + name)
    os.sync()
"#;

pub async fn a_session_is_what_it_was(run: Run) -> anyhow::Result<()> {
    let vm = warm_python(&run.kit, BootOptions::default()).await?;
    vm.eval(SESSION).await?;
    let mut points: Vec<(Point, serde_json::Value)> = Vec::new();
    let mut pauses = Vec::new();
    for number in 0..times(2, 50) {
        vm.eval(&format!("step({number})")).await?;
        let seen = vm.eval("look()").await?;
        let point = vm.checkpoint().await?;
        points.push((point, seen));
        vm.eval("wreck()").await?;
        // Back to an older checkpoint, then forward to the newest.
        let older = (number * 7) / 11;
        for at in [older, number] {
            let (point, seen) = points.get(at).context("there is such a point")?;
            pauses.push(vm.rollback(point).await?.pause_us);
            is_as(&vm, seen)
                .await
                .with_context(|| format!("after going back to point {at} of {}", points.len()))?;
        }
    }
    pauses.sort_unstable();
    eprintln!(
        "{} roll-backs; pauses of {:?} to {:?} us",
        pauses.len(),
        pauses.first(),
        pauses.last()
    );
    Ok(())
}

async fn is_as(vm: &Vm, seen: &serde_json::Value) -> anyhow::Result<()> {
    vm.answers().await?;
    let now = vm.eval("look()").await?;
    ensure!(now == *seen, "{now} instead of {seen}");
    let complaints = vm
        .sh("dmesg | grep -c -i -e 'i/o error' -e 'ext4-fs error' -e 'bug:' || true")
        .await?;
    ensure!(complaints == "0", "{complaints} complaints of the kernel");
    Ok(())
}
