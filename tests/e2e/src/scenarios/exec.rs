//! Commands in a guest: environment, exit codes, signals, process groups, flow control.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use forkd_agent_client::{Calls, Output};
use forkd_guest_proto::{
    AttachRequest, ErrorCode, ExecRequest, ExitStatus, ProcessState, Rlimit, RlimitResource,
};
use forkd_testkit::{BootOptions, Vm, procfs};
use futures::future::try_join_all;

use crate::scenario::{Registered, Run, everyday, times};

pub const SCENARIOS: &[Registered] = &[
    everyday!(surroundings_of_a_process),
    everyday!(endless_output_is_held_back),
    everyday!(many_and_one_after_another),
];

const AT_ONCE: usize = 100;

pub async fn many_and_one_after_another(run: Run) -> anyhow::Result<()> {
    let vm = run.kit.boot(BootOptions::default()).await?;
    let agent = vm.agent().await?;
    for number in 0..times(100, 1_000) {
        exact_output(&agent, number).await?;
    }
    try_join_all((0..AT_ONCE).map(|number| exact_output(&agent, number))).await?;
    Ok(())
}

async fn exact_output(agent: &Calls, number: usize) -> anyhow::Result<()> {
    let request = shell(&format!(
        "printf 'out {number}\\n'; printf 'err {number}' >&2; exit {}",
        number % 200
    ));
    let done = agent.exec_capture(request).await?;
    let code = i32::try_from(number % 200)?;
    ensure!(
        done.stdout == format!("out {number}\n").as_bytes()
            && done.stderr == format!("err {number}").as_bytes()
            && done.result.status == ExitStatus::Code(code)
            && !done.truncated,
        "number {number} gave {done:?}"
    );
    Ok(())
}

pub async fn surroundings_of_a_process(run: Run) -> anyhow::Result<()> {
    let vm = run.kit.boot(BootOptions::default()).await?;
    let agent = vm.agent().await?;
    environment(&agent).await?;
    input_and_output(&agent).await?;
    ways_to_end(&agent).await?;
    process_groups(&vm, &agent).await?;
    background(&agent).await?;
    Ok(())
}

fn shell(line: &str) -> ExecRequest {
    ExecRequest {
        shell: Some(line.to_owned()),
        ..Default::default()
    }
}

async fn stdout(agent: &Calls, request: ExecRequest) -> anyhow::Result<String> {
    let done = agent.exec_capture(request).await?;
    ensure!(done.result.status.success(), "{done:?}");
    Ok(String::from_utf8(done.stdout)?)
}

async fn environment(agent: &Calls) -> anyhow::Result<()> {
    let request = ExecRequest {
        env: vec![
            ("COLOUR".into(), Some("blue = green".into())),
            ("PATH".into(), Some("/usr/bin:/bin".into())),
        ],
        cwd: Some("/usr/share".into()),
        user: Some("nobody".into()),
        ..shell("echo \"$COLOUR|$(pwd)|$(id -un)|$(id -u)|$PATH\"")
    };
    let seen = stdout(agent, request).await?;
    ensure!(
        seen == "blue = green|/usr/share|nobody|65534|/usr/bin:/bin\n",
        "{seen:?}"
    );
    let request = ExecRequest {
        argv: vec!["/usr/bin/env".into()],
        clear_env: true,
        env: vec![("ONLY".into(), Some("this".into()))],
        ..Default::default()
    };
    let seen = stdout(agent, request).await?;
    ensure!(seen == "ONLY=this\n", "{seen:?}");
    let request = ExecRequest {
        rlimits: vec![Rlimit {
            resource: RlimitResource::Nofile,
            limit: Some(77),
        }],
        ..shell("ulimit -n")
    };
    ensure!(stdout(agent, request).await? == "77\n", "the limit");
    let unknown = agent
        .exec(ExecRequest {
            user: Some("nobody-of-that-name".into()),
            ..shell("true")
        })
        .await;
    ensure!(
        unknown
            .err()
            .is_some_and(|error| error.code() == Some(ErrorCode::NotFound)),
        "an unknown user"
    );
    Ok(())
}

async fn input_and_output(agent: &Calls) -> anyhow::Result<()> {
    let input: Vec<u8> = (0..1_000_000u32).map(|n| (n % 251) as u8).collect();
    let request = ExecRequest {
        argv: vec!["cat".into()],
        ..Default::default()
    };
    let done = agent
        .exec_capture_with(request, &input, 2 * input.len())
        .await?;
    ensure!(done.stdout == input, "cat gave {} bytes", done.stdout.len());
    let empty = stdout(agent, shell("wc -c")).await?;
    ensure!(empty.trim() == "0", "standard input is not empty: {empty}");
    Ok(())
}

async fn ways_to_end(agent: &Calls) -> anyhow::Result<()> {
    for (line, wanted) in [
        ("exit 0", ExitStatus::Code(0)),
        ("exit 7", ExitStatus::Code(7)),
        ("kill -9 $$", ExitStatus::Signal(9)),
        ("kill -TERM $$", ExitStatus::Signal(15)),
    ] {
        let done = agent.exec_capture(shell(line)).await?;
        ensure!(done.result.status == wanted, "{line}: {done:?}");
    }
    let missing = agent
        .exec(ExecRequest {
            argv: vec!["/no/such/program".into()],
            ..Default::default()
        })
        .await;
    let code = missing.err().and_then(|error| error.code());
    ensure!(
        matches!(code, Some(ErrorCode::ExecFailed | ErrorCode::NotFound)),
        "a missing program gave {code:?}"
    );
    let request = |timeout, line| ExecRequest {
        timeout_ms: Some(timeout),
        grace_ms: Some(300),
        ..shell(line)
    };
    let done = agent.exec_capture(request(300, "sleep 1000")).await?;
    ensure!(
        done.result.timed_out && done.result.status == ExitStatus::Signal(15),
        "{done:?}"
    );
    // Enough time for a slow guest to reach the trap.
    let stubborn = "trap '' TERM; while :; do sleep 0.1; done";
    let done = agent.exec_capture(request(5_000, stubborn)).await?;
    ensure!(
        done.result.timed_out && done.result.status == ExitStatus::Signal(9),
        "{done:?}"
    );
    let trapped = agent
        .exec(shell(
            "trap 'echo got it; exit 3' USR1; echo ready; while :; do sleep 0.1; done",
        ))
        .await?;
    signal_when_ready(trapped).await
}

async fn signal_when_ready(mut exec: forkd_agent_client::Exec) -> anyhow::Result<()> {
    let mut seen = Vec::new();
    let mut sent = false;
    while let Some(output) = exec.next_output().await? {
        if let Output::Stdout(bytes) = output {
            seen.extend(bytes);
        }
        if !sent && seen.starts_with(b"ready\n") {
            exec.signal(10);
            sent = true;
        }
    }
    let result = exec.wait().await?;
    ensure!(
        seen == b"ready\ngot it\n" && result.status == ExitStatus::Code(3),
        "{result:?} after {:?}",
        String::from_utf8_lossy(&seen)
    );
    Ok(())
}

/// Ending a process ends what it has started, too.
async fn process_groups(vm: &Vm, agent: &Calls) -> anyhow::Result<()> {
    let mut exec = agent
        .exec(shell("sleep 4321 & echo $!; sleep 4321"))
        .await?;
    let Some(Output::Stdout(bytes)) = exec.next_output().await? else {
        bail!("the process said nothing");
    };
    let child = String::from_utf8(bytes)?.trim().to_owned();
    vm.sh(&format!("kill -0 {child}")).await?;
    exec.signal(9);
    exec.wait().await?;
    let left = vm
        .sh("for n in /proc/[0-9]*; do tr '\\0' ' ' < $n/cmdline; echo; done | grep -c '^sleep 4321' || true")
        .await?;
    ensure!(left == "0", "{left} of the group's processes live on");
    Ok(())
}

async fn background(agent: &Calls) -> anyhow::Result<()> {
    let request = ExecRequest {
        tag: Some("counter".into()),
        keep_output: Some(64 * 1024),
        stdin: true,
        ..shell("echo begun; while read line; do echo \"heard $line\"; done; exit 5")
    };
    let started = agent.start(request).await?;
    let listed = agent.processes().await?;
    let found = listed
        .iter()
        .find(|info| info.process == started.process)
        .context("a background process is not listed")?;
    ensure!(
        found.tag.as_deref() == Some("counter") && found.state == ProcessState::Running,
        "{found:?}"
    );
    let mut attached = agent
        .attach(AttachRequest {
            process: started.process,
            replay: true,
            since: None,
            stdin: true,
            lossless: true,
        })
        .await?;
    let stdin = attached.stdin();
    stdin.write(b"me\n").await?;
    stdin.close();
    let mut seen = Vec::new();
    while let Some(output) = attached.next_output().await? {
        if let Output::Stdout(bytes) = output {
            seen.extend(bytes);
        }
    }
    let result = attached.wait().await?;
    ensure!(
        seen == b"begun\nheard me\n" && result.status == ExitStatus::Code(5),
        "{result:?} after {:?}",
        String::from_utf8_lossy(&seen)
    );
    let sleeper = agent.start(shell("sleep 5432")).await?;
    agent.signal(sleeper.process, 9, true).await?;
    let ended = agent.wait(sleeper.process).await?;
    ensure!(ended.status == ExitStatus::Signal(9), "{ended:?}");
    agent.forget(sleeper.process).await?;
    let listed = agent.processes().await?;
    ensure!(
        listed.iter().all(|info| info.process != sleeper.process),
        "a forgotten process is still listed"
    );
    Ok(())
}

/// A command that prints without end waits for its reader, and fills neither the VMM nor this process.
pub async fn endless_output_is_held_back(run: Run) -> anyhow::Result<()> {
    let vm = run.kit.boot(BootOptions::default()).await?;
    let agent = vm.agent().await?;
    let before = own_memory(&vm)?;
    let mut exec = agent.exec(shell("yes 0123456789abcdef")).await?;
    let mut taken = 0;
    while taken < 8 << 20 {
        match exec.next_output().await? {
            Some(Output::Stdout(bytes)) => taken += bytes.len() as u64,
            other => bail!("{other:?} from an endless printer"),
        }
    }
    let held = settled_output(&agent, exec.started().process).await?;
    let ahead = held.saturating_sub(taken);
    ensure!(ahead < 8 << 20, "{ahead} bytes are under way, unread");
    let after = own_memory(&vm)?;
    let grown = after.saturating_sub(before);
    ensure!(grown < 8 << 10, "VMM and test grew by {grown} KiB");
    drop(exec);
    ensure!(vm.sh("echo here").await? == "here", "the guest goes on");
    Ok(())
}

/// The output of a process, once it stops printing because its output is not read.
async fn settled_output(agent: &Calls, process: u64) -> anyhow::Result<u64> {
    let mut last = None;
    for _ in 0..100 {
        let listed = agent.processes().await?;
        let info = listed.iter().find(|info| info.process == process);
        let now = info.context("the printer is gone")?.output_bytes;
        if last == Some(now) {
            return Ok(now);
        }
        last = Some(now);
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    bail!("the printer goes on without a reader")
}

/// Memory of the VMM without guest memory, plus memory of this process, in KiB.
fn own_memory(vm: &Vm) -> anyhow::Result<u64> {
    let vmm = procfs::memory(vm.pid())?.own_pss;
    Ok(vmm + procfs::memory(std::process::id())?.own_pss)
}
