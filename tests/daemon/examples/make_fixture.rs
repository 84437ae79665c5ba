//! Makes a data directory for `tests/compat.rs` with the programs of a released or earlier version.
//!
//! `cargo run -p forkd-daemon-tests --example make_fixture -- DIR OUT.tar.gz`, where `DIR` holds `forkd-controller`,
//! `forkd-spawn`, and as `forkd-vmm` a fake VMM that speaks the protocol of that version.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, ensure};
use forkd_api::{BranchMode, CheckpointRequest, CreateWorkspace, UpdateSandbox};
use forkd_daemon_tests::{Daemon, Options, Programs, Sandbox};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1).map(PathBuf::from);
    let usage = "usage: make_fixture DIR OUT.tar.gz";
    let (dir, out) = (args.next().context(usage)?, args.next().context(usage)?);
    let program = |name: &str| dir.join(name).to_string_lossy().into_owned();
    let programs = Programs::new(
        &program("forkd-controller"),
        &program("forkd-spawn"),
        &program("forkd-vmm"),
        &program("forkd-net"),
        &program("forkd-broker"),
        &program("forkd-image"),
    );
    let mut daemon = Daemon::with(programs, Options::default()).await;
    fill(&daemon).await?;
    daemon.stop().await;
    let status = Command::new("tar")
        .args(["--create", "--gzip", "--sparse", "--exclude=./parent"])
        .arg("--owner=0")
        .arg("--group=0")
        .arg("--file")
        .arg(&out)
        .arg("--directory")
        .arg(daemon.data())
        .arg(".")
        .status()?;
    ensure!(status.success(), "tar ended with {status}");
    Ok(())
}

/// One of everything that a daemon keeps.
async fn fill(daemon: &Daemon) -> anyhow::Result<()> {
    daemon.parent("parent").await?;
    let source = daemon.child("parent").await;
    for (tag, mode) in [
        ("full", BranchMode::Full),
        ("diff", BranchMode::Diff),
        ("live", BranchMode::Live),
    ] {
        source.write("/state", tag).await?;
        source.branch(tag, mode).await?;
    }
    let labels = BTreeMap::from([("kind".to_owned(), "live".to_owned())]);
    let update = UpdateSandbox {
        labels: Some(labels),
        ..UpdateSandbox::default()
    };
    daemon.client().update(&source.id, &update).await?;
    let request = CheckpointRequest {
        name: Some("point".to_owned()),
    };
    daemon.client().checkpoint(&source.id, &request).await?;
    let request = CreateWorkspace {
        name: "workspace".to_owned(),
        snapshot_tag: "live".to_owned(),
        per_child_netns: false,
        memory_limit_mib: None,
        network: None,
    };
    let workspace = daemon.client().create_workspace(&request).await?;
    let id = workspace.live_sandbox_id.context("a workspace runs")?;
    let sandbox = Sandbox::new(daemon.client(), &id);
    sandbox.write("/state", "workspace").await?;
    daemon.client().suspend_workspace("workspace", true).await?;
    Ok(())
}
