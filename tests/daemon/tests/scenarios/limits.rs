//! Limits hold however many requests come at once.

use std::cell::Cell;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use forkd_api::{BranchMode, CreateSandboxes, CreateSnapshot, ErrorCode, SandboxState};
use forkd_daemon_tests::fake::{Fault, Injected, Step};
use forkd_daemon_tests::{Daemon, Options, until};
use forkd_rest_client::Client;

use crate::{TAG, daemon_with};

const LIMIT: usize = 10;
const REQUESTS: usize = 8;
const EACH: usize = 3;

/// Creates sandboxes by several requests of which none is done before all are admitted or refused. Returns how many were
/// made; all others were refused for the limit.
async fn create_at_once(daemon: &Daemon, client: &Client) -> usize {
    let held: Vec<Injected> = (0..REQUESTS * EACH)
        .map(|_| daemon.faults().inject(Step::Prepare, Fault::Hold))
        .collect();
    let refused = Cell::new(0);
    let creating = (0..REQUESTS).map(async |_| {
        let request = CreateSandboxes {
            snapshot_tag: TAG.to_owned(),
            n: EACH as u32,
            ..CreateSandboxes::default()
        };
        match client.spawn(&request).await {
            Ok(made) => made.len(),
            Err(error) => {
                assert_eq!(error.code(), Some(ErrorCode::LimitReached), "{error}");
                refused.set(refused.get() + 1);
                0
            }
        }
    });
    let releasing = async {
        until("every request is admitted or refused", async || {
            let started = daemon.faults().count_reached(&held);
            (started + refused.get() * EACH == REQUESTS * EACH).then_some(())
        })
        .await;
        for fault in &held {
            daemon.faults().release(fault);
        }
        daemon.faults().clear();
    };
    let (made, ()) = tokio::join!(futures::future::join_all(creating), releasing);
    made.iter().sum()
}

#[tokio::test]
async fn sandboxes_of_a_daemon() {
    let daemon = daemon_with(Options::args(&["--max-sandboxes", "10"])).await;
    let made = create_at_once(&daemon, daemon.client()).await;
    assert!((1..=LIMIT).contains(&made), "{made} sandboxes");
    assert_eq!(daemon.sandboxes().await.len(), made);
    daemon.ends_clean().await;
}

#[tokio::test]
async fn branches_under_way() {
    let daemon = daemon_with(Options::args(&["--branch-concurrency", "1"])).await;
    let (first, second) = (daemon.child(TAG).await, daemon.child(TAG).await);
    let held = daemon.faults().inject(Step::CutTaken, Fault::Hold);
    let over = async {
        daemon.faults().reached(&held).await;
        let error = second.branch("second", BranchMode::Diff).await.unwrap_err();
        assert_eq!(error.code(), Some(ErrorCode::LimitReached), "{error}");
        daemon.faults().release(&held);
    };
    let (branched, ()) = tokio::join!(first.branch("first", BranchMode::Diff), over);
    branched.unwrap();
    second.branch("second", BranchMode::Diff).await.unwrap();
    daemon.ends_clean().await;
}

/// A `forkd-image` that never ends. It notes each start, and the number of a program that it waits for.
fn slow_image_program(dir: &Path) -> PathBuf {
    let path = dir.join("slow-image");
    let script = "#!/bin/sh\nsleep 3600 &\necho $! >> \"$0.started\"\nwait\n";
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    path
}

/// The programs that [`slow_image_program`] has started.
fn started(program: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(program.with_extension("started")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn builds_count_before_an_image_is_made_and_end_with_their_tag() {
    let dir = tempfile::tempdir().unwrap();
    let program = slow_image_program(dir.path());
    let options = [
        "--max-builds",
        "1",
        "--image-program",
        program.to_str().unwrap(),
    ];
    let daemon = daemon_with(Options::args(&options)).await;
    let build = async |tag: &str| {
        let request = CreateSnapshot {
            tag: tag.to_owned(),
            image: Some("slow".to_owned()),
            wait: false,
            ..CreateSnapshot::default()
        };
        daemon.client().create_snapshot(&request).await
    };
    build("first").await.unwrap();
    let programs = until("forkd-image runs", async || {
        Some(started(&program)).filter(|found| !found.is_empty())
    })
    .await;
    build("second").await.unwrap();
    let refused = until("the second build is refused", async || {
        let all = daemon.client().snapshots().await.unwrap();
        all.into_iter().find(|info| info.tag == "second")?.warning
    })
    .await;
    assert!(refused.contains("that is the limit"), "{refused}");
    assert_eq!(started(&program), programs, "no second forkd-image");
    daemon
        .client()
        .delete_snapshot("first", false, false)
        .await
        .unwrap();
    until("the programs of the first build have ended", async || {
        let name = std::fs::read(format!("/proc/{}/cmdline", programs[0])).unwrap_or_default();
        name.is_empty().then_some(())
    })
    .await;
    daemon.parent("third").await.unwrap();
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_vmm_that_hangs_does_not_keep_others_from_branching() {
    let options = ["--branch-concurrency", "1", "--vmm-timeout", "5s"];
    let daemon = daemon_with(Options::args(&options)).await;
    let witness = daemon.child(TAG).await;
    for (number, step) in Step::OF_A_CUT.into_iter().enumerate() {
        let source = daemon.child(TAG).await;
        daemon.faults().inject(step, Fault::Hold);
        let error = source.branch("half", BranchMode::Diff).await.unwrap_err();
        assert_eq!(error.code(), Some(ErrorCode::Timeout), "{step:?}: {error}");
        let failed = until("the sandbox has failed", async || {
            let info = source.info().await.unwrap();
            (info.state == SandboxState::Failed).then_some(info)
        })
        .await;
        let reason = failed.error.map(|error| error.error);
        assert!(
            reason
                .as_ref()
                .is_some_and(|text| text.contains("did not answer")),
            "{step:?}: {reason:?}"
        );
        let tag = format!("other{number}");
        witness.branch(&tag, BranchMode::Diff).await.unwrap();
        daemon.client().kill(&source.id).await.unwrap();
    }
    daemon.ends_clean().await;
}

/// About a quarter of a MiB; a file of a fake guest is at most one window of the guest protocol long.
fn large() -> String {
    "x".repeat(250_000)
}

#[tokio::test]
async fn a_full_store_refuses_before_a_source_is_stopped() {
    let daemon = daemon_with(Options::args(&["--store-limit-mib", "1"])).await;
    let source = daemon.child(TAG).await;
    for number in 0.. {
        let text = format!("{number}{}", large());
        source.write("/large", &text).await.unwrap();
        if source
            .branch(&format!("full{number}"), BranchMode::Full)
            .await
            .is_err()
        {
            break;
        }
        assert!(number < 10, "the store takes more than its limit");
    }
    daemon.faults().inject(Step::Cut, Fault::Die);
    daemon.faults().inject(Step::Boot, Fault::Die);
    for mode in [BranchMode::Full, BranchMode::Live] {
        let error = source.branch("more", mode).await.unwrap_err();
        assert!(
            matches!(
                error.code(),
                Some(ErrorCode::LimitReached | ErrorCode::NoSpace)
            ),
            "{error}"
        );
    }
    let error = daemon.parent("more").await.unwrap_err();
    assert!(
        matches!(
            error.code(),
            Some(ErrorCode::LimitReached | ErrorCode::NoSpace)
        ),
        "{error}"
    );
    daemon.faults().clear();
    assert!(source.runs().await);
    daemon.ends_clean().await;
}

#[tokio::test]
async fn bytes_of_the_store_under_many_branches() {
    let options = ["--store-limit-mib", "2", "--branch-concurrency", "3"];
    let daemon = daemon_with(Options::args(&options)).await;
    let sources = daemon.spawn(TAG, 20).await.unwrap();
    for source in &sources {
        // Content of its own, or the store keeps it once.
        let text = format!("{}{}", source.id, large());
        source.write("/large", &text).await.unwrap();
    }
    let mut made = 0;
    for together in sources.chunks(3) {
        let branching = together.iter().map(async |source| {
            let tag = format!("of-{}", source.id);
            source.branch(&tag, BranchMode::Full).await
        });
        for result in futures::future::join_all(branching).await {
            match result {
                Ok(_) => made += 1,
                Err(error) => assert!(
                    matches!(
                        error.code(),
                        Some(ErrorCode::LimitReached | ErrorCode::NoSpace)
                    ),
                    "{error}"
                ),
            }
        }
    }
    // About seven fit; the cuts that were under way when the last one fitted come on top.
    assert!((1..=10).contains(&made), "{made} snapshots");
    let under_way = 3 * 300_000;
    until("refused content is removed", async || {
        let usage = daemon.client().store().await.unwrap();
        (usage.physical_bytes <= usage.limit_bytes.unwrap() + under_way).then_some(())
    })
    .await;
    for source in &sources {
        assert!(source.runs().await);
    }
    daemon.ends_clean().await;
}

#[tokio::test]
async fn sandboxes_of_a_token() {
    let daemon = daemon_with(Options {
        args: vec!["--max-sandboxes-per-token".to_owned(), "10".to_owned()],
        tokens: vec!["one".to_owned(), "two".to_owned()],
    })
    .await;
    let made = create_at_once(&daemon, &daemon.client_of("one")).await;
    assert!((1..=LIMIT).contains(&made), "{made} sandboxes");
    let made = create_at_once(&daemon, &daemon.client_of("two")).await;
    assert!((1..=LIMIT).contains(&made), "{made} sandboxes");
    daemon.ends_clean().await;
}

#[tokio::test]
async fn forks_count_as_branches_under_way() {
    let daemon = daemon_with(Options::args(&["--branch-concurrency", "1"])).await;
    let (first, second) = (daemon.child(TAG).await, daemon.child(TAG).await);
    let held = daemon.faults().inject(Step::CutTaken, Fault::Hold);
    let over = async {
        daemon.faults().reached(&held).await;
        let error = second.fork(1).await.unwrap_err();
        assert_eq!(error.code(), Some(ErrorCode::LimitReached), "{error}");
        daemon.faults().release(&held);
    };
    let (branched, ()) = tokio::join!(first.branch("first", BranchMode::Diff), over);
    branched.unwrap();
    second.fork(1).await.unwrap();
    daemon.ends_clean().await;
}
