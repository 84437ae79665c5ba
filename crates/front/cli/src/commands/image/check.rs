//! `forkd image check`: forks an image and runs the check of its recipe in every child.

use std::time::Instant;

use forkd_api::{CreateSandboxes, CreateSnapshot, ExecRequest, ImageCheck, SandboxInfo};
use forkd_rest_client::Client;
use serde::Serialize;

use crate::commands::children::end;
use crate::daemon::failed;
use crate::error::{CliError, CliResult, Exit};
use crate::table::table;
use crate::ui::Ui;

/// The time that boot and preparation may take. The recipe bounds each step.
const READY_SECS: u64 = 3600;
/// The time after which the daemon deletes children that this command could not delete.
const LIFETIME_SECS: u64 = 6 * 3600;
/// Characters of an output that a table shows.
const SHOWN: usize = 60;

/// The result in one child.
#[derive(Debug, Serialize)]
struct Checked {
    sandbox: String,
    passed: bool,
    seconds: f64,
    output: String,
}

/// Builds a snapshot of the image, forks it, and runs the check in every child. Everything is deleted at the end.
pub async fn check(client: &Client, name: &str, n: u32, json: bool, ui: &Ui) -> CliResult {
    let detail = client.image(name).await.map_err(failed)?;
    let Some(check) = detail.check else {
        return Err(
            CliError::from(anyhow::anyhow!("image {name} declares no check"))
                .with_hint("a recipe declares one in its table [check]"),
        );
    };
    let tag = format!("check-{name}");
    ui.aside(format_args!(
        "booting a parent from {name} and preparing it …"
    ));
    let begin = Instant::now();
    let request = CreateSnapshot {
        tag: tag.clone(),
        image: Some(detail.info.name.clone()),
        ready_timeout_secs: Some(READY_SECS),
        ..CreateSnapshot::default()
    };
    // A check that was killed leaves its snapshot; the image may be another one by now.
    let _ = client.delete_snapshot(&tag, false, true).await;
    client.create_snapshot(&request).await.map_err(failed)?;
    ui.aside(format_args!(
        "parent frozen after {:.1} s; forking {n} children",
        begin.elapsed().as_secs_f64()
    ));
    let request = CreateSandboxes {
        snapshot_tag: tag.clone(),
        n,
        timeout_secs: Some(LIFETIME_SECS),
        ..CreateSandboxes::default()
    };
    let children = client.spawn(&request).await.map_err(failed);
    let checked = match &children {
        Ok(children) => run(client, &check, children).await,
        Err(_) => Vec::new(),
    };
    end(client, children.as_deref().unwrap_or_default()).await;
    let removed = client.delete_snapshot(&tag, false, true).await;
    children?;
    removed.map_err(failed)?;
    let passed = checked.iter().filter(|one| one.passed).count();
    show(&checked, passed, json, ui)?;
    Ok(if passed == checked.len() && passed == n as usize {
        Exit::OK
    } else {
        Exit::FAILURE
    })
}

/// Runs the check in one child after another: they would share the processors of the host otherwise.
async fn run(client: &Client, check: &ImageCheck, children: &[SandboxInfo]) -> Vec<Checked> {
    let mut checked = Vec::with_capacity(children.len());
    for child in children {
        let begin = Instant::now();
        let (passed, output) = match &child.error {
            Some(error) => (false, error.error.clone()),
            None => check_one(client, check, &child.id).await,
        };
        checked.push(Checked {
            sandbox: child.id.clone(),
            passed,
            seconds: begin.elapsed().as_secs_f64(),
            output,
        });
    }
    checked
}

async fn check_one(client: &Client, check: &ImageCheck, id: &str) -> (bool, String) {
    let request = ExecRequest {
        args: check.exec.clone(),
        user: check.user.clone(),
        timeout_secs: check.timeout_secs.into(),
        ..ExecRequest::default()
    };
    match client.exec(id, &request).await {
        Err(error) => (false, forkd_types::chain(&error)),
        Ok(done) => {
            let expected = check
                .stdout
                .as_ref()
                .is_none_or(|text| *text == done.stdout);
            let passed = done.exit_code == 0 && !done.timed_out && expected;
            let output = if passed || done.stderr.trim().is_empty() {
                done.stdout
            } else {
                format!("{}{}", done.stdout, done.stderr)
            };
            (passed, output)
        }
    }
}

fn show(checked: &[Checked], passed: usize, json: bool, ui: &Ui) -> std::io::Result<()> {
    if json {
        return ui.json(&serde_json::json!({
            "passed": passed,
            "failed": checked.len() - passed,
            "children": checked,
        }));
    }
    let rows = checked.iter().map(|one| {
        let output: String = one.output.trim().replace('\n', " ");
        let output = if one.passed {
            output.chars().take(SHOWN).collect()
        } else {
            output
        };
        [
            one.sandbox.clone(),
            if one.passed { "ok" } else { "FAILED" }.to_owned(),
            format!("{:.1} s", one.seconds),
            output,
        ]
    });
    ui.line(table(["SANDBOX", "CHECK", "TIME", "OUTPUT"], rows))?;
    ui.line(format_args!(
        "{passed} passed, {} failed",
        checked.len() - passed
    ))
}
