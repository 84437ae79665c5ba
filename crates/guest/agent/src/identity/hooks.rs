//! Programs of the user that run in every new fork.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use forkd_guest_proto::{ExecRequest, ExitStatus, HookResult};

use crate::agent::{Agent, Role};
use crate::process::Read;

const DIRECTORY: &str = "/etc/forkd/on-fork.d";
/// The bytes of each hook's output that the report carries.
const MAX_OUTPUT: u32 = 2000;

/// Runs the hooks one after another, by name, until the time is over.
pub async fn run(agent: &Agent, generation: &str, time: Duration) -> Vec<HookResult> {
    let start = Instant::now();
    let mut results = Vec::new();
    for path in find(agent.role) {
        let left = time.saturating_sub(start.elapsed());
        results.push(run_one(agent, &path, generation, left).await);
    }
    results
}

fn find(role: Role) -> Vec<PathBuf> {
    // An ordinary process must not run the hooks of the machine it happens to be on.
    let directory = match role {
        Role::Process => crate::agent::run_directory().join("on-fork.d"),
        _ => DIRECTORY.into(),
    };
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let runnable = entries.map(|entry| entry.path()).filter(|path| {
        fs::metadata(path)
            .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    });
    let mut hooks: Vec<_> = runnable.collect();
    hooks.sort();
    hooks.truncate(64);
    hooks
}

async fn run_one(
    agent: &Agent,
    path: &std::path::Path,
    generation: &str,
    left: Duration,
) -> HookResult {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let not_run = |output: String| HookResult {
        name: name.clone(),
        code: None,
        wall_ms: 0,
        output,
    };
    if left.is_zero() {
        return not_run("no time was left for it".to_owned());
    }
    let request = ExecRequest {
        // The image decides who runs commands; hooks change the machine.
        user: (agent.role != Role::Process).then(|| "0".to_owned()),
        shell: Some("exec \"$FORKD_HOOK\" 2>&1".to_owned()),
        env: vec![
            ("FORKD_HOOK".to_owned(), Some(path.display().to_string())),
            ("FORKD_GENERATION".to_owned(), Some(generation.to_owned())),
        ],
        timeout_ms: Some(u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
        grace_ms: Some(100),
        background: true,
        keep_output: Some(MAX_OUTPUT),
        ..Default::default()
    };
    let process = match agent.processes.start(&request) {
        Ok(process) => process,
        Err(error) => return not_run(error.message),
    };
    let result = process.wait().await;
    let output = match process.stdout.follow(true, false).read(MAX_OUTPUT as usize) {
        Some(Read::Bytes { bytes, .. }) => String::from_utf8_lossy(&bytes).into_owned(),
        _ => String::new(),
    };
    let _ = agent.processes.forget(process.id);
    let code = match result.status {
        ExitStatus::Code(code) if !result.timed_out => Some(code),
        _ => None,
    };
    HookResult {
        name,
        code,
        wall_ms: result.wall_ms,
        output,
    }
}
