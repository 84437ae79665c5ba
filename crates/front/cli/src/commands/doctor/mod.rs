//! `forkd doctor`: checks this host and says how to fix problems.

mod daemon;
mod files;
mod kernel;
mod resources;

use std::borrow::Cow;

use serde::Serialize;
use serde_json::json;

use crate::args::DoctorArgs;
use crate::daemon::{block_on, machine_port};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Pass,
    /// Works, with a disadvantage.
    Warn,
    /// Does not work.
    Fail,
    /// Not checked: unreadable or irrelevant here.
    Skip,
}

impl Verdict {
    fn glyph(self) -> &'static str {
        match self {
            Self::Pass => "✓",
            Self::Warn => "⚠",
            Self::Fail => "✗",
            Self::Skip => "·",
        }
    }
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Name of the check.
    pub name: &'static str,
    pub verdict: Verdict,
    /// The observed value.
    pub detail: String,
    /// How to fix it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<Cow<'static, str>>,
}

impl Check {
    /// A check without a problem.
    pub fn pass(name: &'static str, detail: impl Into<String>) -> Self {
        Self::new(name, Verdict::Pass, detail, None)
    }

    /// Works, with a disadvantage.
    pub fn warn(
        name: &'static str,
        detail: impl Into<String>,
        hint: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::new(name, Verdict::Warn, detail, Some(hint.into()))
    }

    /// Does not work.
    pub fn fail(
        name: &'static str,
        detail: impl Into<String>,
        hint: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::new(name, Verdict::Fail, detail, Some(hint.into()))
    }

    /// A check that was not made.
    pub fn skip(name: &'static str, detail: impl Into<String>) -> Self {
        Self::new(name, Verdict::Skip, detail, None)
    }

    fn new(
        name: &'static str,
        verdict: Verdict,
        detail: impl Into<String>,
        hint: Option<Cow<'static, str>>,
    ) -> Self {
        Self {
            name,
            verdict,
            detail: detail.into(),
            hint,
        }
    }
}

/// Runs `forkd doctor`.
pub fn run(args: &DoctorArgs, ui: &Ui) -> CliResult {
    let mut checks = kernel::checks();
    if machine_port().is_some() {
        lean_on_machine(&mut checks);
    }
    checks.extend(resources::checks());
    checks.extend(files::checks());
    block_on(async {
        checks.extend(daemon::checks(&args.daemon).await);
        let count = |verdict| {
            checks
                .iter()
                .filter(|check| check.verdict == verdict)
                .count()
        };
        let failed = count(Verdict::Fail);
        if args.json {
            ui.json(&json!({
                "checks": checks,
                "pass": count(Verdict::Pass),
                "warn": count(Verdict::Warn),
                "fail": failed,
                "skip": count(Verdict::Skip),
            }))?;
        } else {
            for check in &checks {
                ui.line(format_args!(
                    "{} {:18} {}",
                    check.verdict.glyph(),
                    check.name,
                    check.detail
                ))?;
                if let Some(hint) = &check.hint {
                    ui.line(format_args!("  → {hint}"))?;
                }
            }
            ui.line(format_args!(
                "pass={} warn={} fail={failed} skip={}",
                count(Verdict::Pass),
                count(Verdict::Warn),
                count(Verdict::Skip)
            ))?;
        }
        Ok(if failed > 0 { Exit::FAILURE } else { Exit::OK })
    })
}

/// With a running machine, a KVM that cannot run guests is a warning instead of a failure.
fn lean_on_machine(checks: &mut [Check]) {
    let failed = |check: &&mut Check| check.name == "kvm" && check.verdict == Verdict::Fail;
    if let Some(check) = checks.iter_mut().find(failed) {
        check.verdict = Verdict::Warn;
        check.hint = Some("guests run in the machine, where they are slower".into());
    }
}

/// The first line of a file, trimmed.
pub fn read(path: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.lines().next().unwrap_or_default().trim().to_owned())
}

/// The number in a file.
pub fn number(path: &str) -> Option<u64> {
    read(path)?.parse().ok()
}

/// A line of `/proc/meminfo`, in KiB or plain.
pub fn meminfo(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find(|line| line.starts_with(&format!("{key}:")))?;
    line.split_whitespace().nth(1)?.parse().ok()
}
